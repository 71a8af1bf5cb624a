"""Looking at the processes of this host: who runs a flow run, and ending what it left (Linux)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

import psutil

from tasks.kernel.process import processes_by_variable, variable_of

RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""Set by a worker in the environment of a run's engine, and inherited by all that it starts."""
ENGINE = "prefect.engine"
POLL_S = 0.1
END_GRACE_S = 5.0  # between SIGTERM and SIGKILL


def processes_by_run() -> dict[str, list[int]]:
    """Processes of this user's by the flow run in whose environment they were started."""
    return processes_by_variable(RUN_VARIABLE)


def is_engine(pid: int) -> bool:
    """True for the process that runs a flow run itself, not for what it has forked or started.

    A worker starts it as the leader of a process group of its own.
    """
    try:
        return ENGINE in psutil.Process(pid).cmdline() and os.getpgid(pid) == pid
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False


def end_processes(run: str, pids: Iterable[int], grace_s: float = END_GRACE_S) -> tuple[int, ...]:
    """End the processes of a run: SIGTERM, and SIGKILL for those that are left after the grace.

    A process is signalled only while its environment names the run, so that a reused id is spared.

    Returns:
        Those that were still there in the end.
    """
    left = {pid for pid in pids if _is_of(pid, run)}
    for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for pid in left:
            _send(pid, number)
        deadline = time.monotonic() + limit_s
        while (left := {pid for pid in left if _is_of(pid, run)}) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    return tuple(sorted(left))


def _is_of(pid: int, run: str) -> bool:
    return variable_of(pid, RUN_VARIABLE) == run


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
