"""Processes of the controller for tests: ask many times, or die at a named moment.

    python -m tests.support.control.controller_process URL RUNS_FOLDER storm RESULT TIMES
    python -m tests.support.control.controller_process URL RUNS_FOLDER die-before|die-after RESULT
    python -m tests.support.control.controller_process URL RUNS_FOLDER sweep

A run of this platform is a file named by its key, made with O_EXCL, so each key has one run.
"""

import os
import signal
import sys
from pathlib import Path

from tasks.control.retraining.records import Order, StartedAction
from tests.support.control.controller import Controller, Runs


class FileRuns(Runs):
    """Keeps one file for each run."""

    def __init__(self, folder: Path, die: str = "") -> None:
        super().__init__()
        self.folder, self.die = folder, die

    def start(self, order: Order) -> StartedAction:
        if self.die == "die-before":
            os.kill(os.getpid(), signal.SIGKILL)
        (self.folder / order.incident_id).touch()
        if self.die == "die-after":
            os.kill(os.getpid(), signal.SIGKILL)
        return StartedAction(kind="deployment", run_id=order.incident_id, place="a file")


def main(url: str, folder: str, command: str, result_id: str = "", times: str = "1") -> None:
    controller = Controller(url)
    controller.runs = FileRuns(Path(folder), command)
    if command == "sweep":
        controller.sweep()
        return
    for _ in range(int(times)):
        controller.ask(result_id)


if __name__ == "__main__":
    main(*sys.argv[1:])
