"""Looking at the processes of this host: who runs a flow run, and ending what it left (Linux)."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

import psutil

from tasks.kernel.process import ProcessName, processes_by_variable, variable_of

RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""Set by a worker in the environment of a run's engine, and inherited by all that it starts."""
ENGINE = "prefect.engine"
POLL_S = 0.1
END_GRACE_S = 5.0  # between SIGTERM and SIGKILL

HOST, BOOT, SPACE = "falaj.host", "falaj.boot", "falaj.space"
PID, STARTED = "falaj.pid", "falaj.started"
NOT_RETRIED = "falaj.not_retried"
"""Why a run is not started again by itself when it was cut off."""


def own_labels() -> dict[str, bool | int | float | str]:
    """This process, as labels of a run."""
    mine = ProcessName.of_this()
    return {
        HOST: socket.gethostname(),
        BOOT: mine.boot,
        SPACE: mine.space,
        PID: mine.pid,
        STARTED: mine.start,
    }


def process_of(labels: Mapping[str, Any]) -> ProcessName | None:
    """The process that labels name; None where it is another host's, or there are none."""
    if labels.get(HOST) != socket.gethostname():
        return None
    space = labels.get(SPACE) or ProcessName.of_this().space  # earlier versions noted none
    return ProcessName(
        boot=str(labels[BOOT]), space=str(space), pid=int(labels[PID]), start=int(labels[STARTED])
    )


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
