"""A driver that drills kill: `python -m tests.support.ranks.training_driver FOLDER started|forked`.

Trains the small model with many checkpoints within each epoch, and says when an epoch is done.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tasks.contracts.training import EpochMetrics, TrainedModel
from tasks.training.config import TrainingConfig
from tests.support.ranks.runs import CONFIG, config, train

EVERY_S = 0.1


def drilled(how: str) -> TrainingConfig:
    """The small configuration, with ranks that are `started` or `forked`."""
    launch = {**CONFIG.launch.model_dump(), "fork_ranks": how == "forked"}
    return config(launch=launch, checkpoints={"every_s": EVERY_S})


def run(folder: Path, how: str) -> TrainedModel:
    """Train under `folder`, from where an earlier attempt ended."""

    def say(metrics: EpochMetrics) -> None:
        sys.stdout.write(f"epoch {metrics.epoch}\n")
        sys.stdout.flush()

    return train(folder, drilled(how), say)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])
