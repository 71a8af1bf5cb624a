"""A rank program of which rank 1 never comes to the second exchange."""

import os
import sys
import threading
from pathlib import Path

import numpy as np

from tasks.training.core.run_directory import RunDirectory
from tasks.training.launch.worker import errors_reported
from tasks.training.strategies.communicators import HorovodCommunicator


def main(arguments: list[str]) -> None:
    with errors_reported(RunDirectory(Path(arguments[0])), int(os.environ["HOROVOD_RANK"])):
        ranks = HorovodCommunicator()
        ranks.sum(np.ones(1))
        if ranks.rank == 1:
            threading.Event().wait()
        ranks.sum(np.ones(1))


if __name__ == "__main__":
    main(sys.argv[1:])
