"""A driver that drills kill: `python -m tests.support.ranks.training_driver FOLDER`.

Trains the small model with many checkpoints within each epoch, and says when an epoch is done.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tasks.contracts.training import TrainedModel
from tests.support.ranks.runs import config, say_epoch, train

EVERY_S = 0.1


def run(folder: Path) -> TrainedModel:
    """Train under `folder`, from where an earlier attempt ended."""
    return train(folder, config(checkpoints={"every_s": EVERY_S}), say_epoch)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
