"""Programs and commands of this project from tests, and looking at processes."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from infra.bench.parts import wait_until
from tasks.kernel.settings import PROJECT_ROOT

RUN_LIMIT_S = 300


def python(*words: str, **options: Any) -> subprocess.Popen[str]:
    """Start Python in the project's folder, where it finds the project; its pipes carry text.

    Args:
        words: behind `python` on the command line.
        options: of `subprocess.Popen`; `env` says all but where the project is.
    """
    return subprocess.Popen([sys.executable, *words], **_in_project(options))


def run_python(
    *words: str, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Let Python run to its end, as `python` starts it, and keep what it says.

    Args:
        words: behind `python` on the command line.
        check: its exit code must be 0.
        options: of `subprocess.run`.
    """
    usual = {"capture_output": True, "timeout": RUN_LIMIT_S}
    done = subprocess.run([sys.executable, *words], **_in_project({**usual, **options}))
    assert not check or done.returncode == 0, done.stderr
    return done


def _in_project(options: dict[str, Any]) -> dict[str, Any]:
    found = {**options.get("env", os.environ), "PYTHONPATH": str(PROJECT_ROOT)}
    return {"cwd": PROJECT_ROOT, "text": True, **options, "env": found}


def falaj(*words: str, **environment: str) -> subprocess.Popen[str]:
    """Start a command as from a new terminal: of a Prefect server it knows what it is given."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    line = ["-u", "-m", "falaj", *words]
    return python(
        *line,
        env={**inherited, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
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
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if text.encode() in file.read_bytes():
                found.append(int(file.parent.name))
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
