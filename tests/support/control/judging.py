"""A drift check that has seen trouble and is about to report it.

Run as `python -m tests.support.control.judging FOLDER`.

It says `ready` in the folder, and goes on when `go` is there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from prefect import flow

from tasks.control.retraining.task import store_drift_result
from tests.support.control import builders
from tests.support.control.platforms import USE_CASE


@flow
def judge(folder: str) -> None:
    """Store a result and emit its event."""
    (Path(folder) / "ready").touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.1)
    report = builders.report(auc=builders.metric(-0.1))
    store_drift_result(report, builders.reference(1), None, None, USE_CASE, builders.FREE)


if __name__ == "__main__":
    judge(sys.argv[1])
