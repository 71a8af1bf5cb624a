"""Runs Envoy as a child: told to end, it takes no new connections and answers what it has begun."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from infra.gateway.admin import Admin
from infra.gateway.config import EdgePlan
from infra.gateway.envoy_process import envoy_command
from infra.gateway.place import ADMIN_SOCKET
from tasks.kernel.errors import ConfigurationError, TransientError

RUNNING = "running.lock"
LOCK_WAIT_S = 5.0
"""An Envoy whose parent was killed goes within moments."""
ANSWER_S = 8.0
"""For what is in flight; the platform kills what has not ended after ten seconds."""
PAUSE_S = 0.05
ACTIVE = r"http\.edge\.downstream_rq_active"


def run_envoy(plan: EdgePlan) -> int:
    """Run Envoy until it ends or this process is told to; returns Envoy's exit code.

    Raises:
        ConfigurationError: one runs for this state folder already, or none is installed.
    """
    command = envoy_command(plan)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    with _lock(plan.place.folder / RUNNING) as descriptor:
        (plan.place.folder / ADMIN_SOCKET).unlink(missing_ok=True)
        process = subprocess.Popen(
            command,
            cwd=plan.place.folder,
            pass_fds=(descriptor,),
            umask=0o077,
            start_new_session=True,  # a terminal's Ctrl-C is for this process
            preexec_fn=_die_with_parent,
        )
        try:
            while process.poll() is None and not stopping.wait(PAUSE_S):
                pass
            if process.poll() is None:
                _answer_what_is_begun(Admin(plan.place.folder))
        finally:
            process.terminate()
            code = process.wait()
    return 0 if stopping.is_set() else code


def _answer_what_is_begun(admin: Admin) -> None:
    """No new connections, and old ones are told to close; returns when nothing is in flight."""
    deadline = time.monotonic() + ANSWER_S
    with contextlib.suppress(TransientError):  # it has ended by itself
        admin.post("/healthcheck/fail")
        admin.post("/drain_listeners")
        while any(admin.stats(ACTIVE).values()) and time.monotonic() < deadline:
            time.sleep(PAUSE_S)


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[int]:
    """Two Envoys would share the port unseen. Envoy inherits the lock, so it ends with both."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + LOCK_WAIT_S
        while not _is_taken(descriptor):
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"an Envoy runs in {file.parent} already; it takes what `prepare` writes"
                )
            time.sleep(PAUSE_S)
        yield descriptor
    finally:
        os.close(descriptor)


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
