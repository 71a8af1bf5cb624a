"""A rank of the launch figure: the real worker, which notes the moment of its first step.

The moment is one of the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tasks.training.launch import worker
from tasks.training.strategies.data_parallel import HorovodStrategy

FIRST_STEP_FILE = "first-step"


def main(arguments: list[str]) -> None:
    """Train as the worker does."""
    file = Path(arguments[0]) / FIRST_STEP_FILE
    train_step = HorovodStrategy.train_step

    def noted(strategy: HorovodStrategy, *given: Any) -> Any:
        loss = train_step(strategy, *given)
        if not file.exists():
            file.write_text(str(time.monotonic()))
        return loss

    setattr(HorovodStrategy, train_step.__name__, noted)
    worker.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
