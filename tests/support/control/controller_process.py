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

from tasks.control.retraining.incidents import Here, answer, note_ends, settle, start_claimed
from tasks.control.retraining.ledger import Ledger
from tasks.control.retraining.records import ClaimState, Order, RunEnd, StartedAction


class FileRuns:
    """Keeps one file for each run."""

    def __init__(self, folder: Path, die: str = "") -> None:
        self.folder, self.die = folder, die

    def start(self, order: Order) -> StartedAction:
        if self.die == "die-before":
            os.kill(os.getpid(), signal.SIGKILL)
        (self.folder / order.incident_id).touch()
        if self.die == "die-after":
            os.kill(os.getpid(), signal.SIGKILL)
        return StartedAction(kind="deployment", run_id=order.incident_id, place="a file")

    def end(self, order: Order, started: StartedAction) -> RunEnd | None:
        return None


def main(url: str, folder: str, command: str, result_id: str = "", times: str = "1") -> None:
    ledger, runs = Ledger(url), FileRuns(Path(folder), command)
    if command == "sweep":
        note_ends(ledger, runs.end)
        for model, use_case in ledger.unsettled():
            settle(ledger, model, use_case, "the sweep", Here(None))
        left = [claim.order for claim in ledger.claims(ClaimState.CLAIMED)]
        start_claimed(ledger, left, runs.start)
        return
    for _ in range(int(times)):
        made = answer(ledger, result_id, f"process {os.getpid()}", Here(None))
        start_claimed(ledger, made.orders, runs.start)


if __name__ == "__main__":
    main(*sys.argv[1:])
