"""Commands of `python -m falaj` from tests, and looking at processes."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from infra.bench.parts import wait_until
from tasks.kernel.settings import PROJECT_ROOT


def falaj(*words: str, **environment: str) -> subprocess.Popen[str]:
    """Start a command as from a new terminal: of a Prefect server it knows what it is given."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "falaj", *words],
        cwd=PROJECT_ROOT,
        env={**inherited, "PYTHONPATH": str(PROJECT_ROOT), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_falaj(*words: str, limit_s: float = 900, **environment: str) -> tuple[int, str]:
    """Exit code of a command, and what it said."""
    with falaj(*words, **environment) as process:
        try:
            said, _ = process.communicate(timeout=limit_s)
        finally:
            process.kill()  # one that hangs would be waited for without end
    return process.returncode, said


def pids_whose_command_holds(text: str) -> list[int]:
    """Process ids of living processes whose command line holds `text`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in command:
                found.append(int(entry.name))
    return found


def command_of(pid: int) -> str:
    """The command line of a process; empty where it has just ended."""
    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def wait_patiently(condition: Callable[[], object], what: str) -> None:
    """Wait for what takes minutes on a busy machine, without making it busier."""
    wait_until(condition, what, limit_s=3600, pause_s=1)


def processes_of(home: Path) -> list[psutil.Process]:
    """Processes that name the state folder on their command line or in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            told = [*process.cmdline(), *process.environ().values()]
            if any(str(home) in word for word in told) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
