"""Which process something belongs to, whether it is there, how far it is, how one starts (Linux).

A process id alone is no name: ids come again, and each container counts its own. The machine's
boot, the namespace of process ids and the moment of the start make one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from pydantic import Field

from tasks.kernel.errors import TransientError
from tasks.kernel.guard import KILL_WAIT_S, guarded
from tasks.kernel.values import Contract

PROCFS = Path("/proc")
ENDED_STATES = ("Z", "X")
STATE_FIELD, START_FIELD = 0, 19  # of /proc/PID/stat, counted after the command's name
READY_POLL_S = 0.1
STOP_MARGIN_S = 10.0
PROGRESS = logging.getLogger("progress")
"""Gets how far long work is, for whoever shows it."""
TOKEN = r"[0-9a-f]{8}\.[0-9a-f]+\.[0-9a-f]+"


class ProcessName(Contract):
    """One process of one boot of one machine."""

    boot: str = Field(description="Id of the machine's boot.")
    space: str = Field(description="Namespace of process ids, such as a container has its own.")
    pid: int = Field(ge=1, description="Process id.")
    start: int = Field(ge=0, description="Its start, in clock ticks since the boot.")

    @classmethod
    def of_this(cls) -> Self:
        """The calling process."""
        space, pid = os.readlink(PROCFS / "self" / "ns" / "pid"), os.getpid()
        return cls(boot=boot_id(), space=space, pid=pid, start=start_of(pid) or 0)

    @property
    def token(self) -> str:
        """Name of the process as part of a file's name: `<boot and namespace>.<pid>.<start>`."""
        seen_from = hashlib.sha256(f"{self.boot} {self.space}".encode()).hexdigest()[:8]
        return f"{seen_from}.{self.pid:x}.{self.start:x}"

    def is_visible_to(self, other: ProcessName) -> bool:
        """True where `other` can see in `/proc` whether this process is there."""
        return (self.boot, self.space) == (other.boot, other.space)

    def sees_alive(self, token: str) -> bool | None:
        """Whether the process of a token is there; None where this one cannot see it."""
        seen_from, pid, start = token.split(".")
        if not self.token.startswith(f"{seen_from}."):
            return None
        return start_of(int(pid, 16)) == int(start, 16)

    def has_ended(self) -> bool:
        """True where the process is gone; to be asked only where it is visible."""
        return start_of(self.pid) != self.start


def boot_id() -> str:
    """Id of this boot of this machine; containers on it have the same."""
    return (PROCFS / "sys/kernel/random/boot_id").read_text().strip()


def start_of(pid: int) -> int | None:
    """Start of a process in clock ticks since the boot; None where it is not there or has ended."""
    try:
        text = (PROCFS / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name in () may hold anything
    return None if fields[STATE_FIELD] in ENDED_STATES else int(fields[START_FIELD])


def tree_cpu_s() -> float:
    """CPU seconds of this process and all that descends from it, ended ones included.

    Those that live have their own; a process that has ended is in the sum of the one that waited
    for it (`cutime` and `cstime` of proc_pid_stat(5)), to a tick (10 ms) of each. What nobody of
    the tree waited for is lost.
    """
    import psutil  # here: not every process that asks for its name counts its time

    tree, found = psutil.Process(), 0.0
    for process in (tree, *tree.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            found += sum(process.cpu_times()[:4])
    return found


def processes_by_variable(name: str) -> dict[str, list[int]]:
    """Process ids of what runs, by the value that a variable had in the environment of its start.

    Processes of other users, whose environment cannot be read, are not seen.
    """
    found: dict[str, list[int]] = {}
    import psutil

    for pid in psutil.pids():
        if value := variable_of(pid, name):
            found.setdefault(value, []).append(pid)
    return found


def variable_of(pid: int, name: str) -> str | None:
    """A variable of the environment that a process was started with.

    None where it is not set, or the process has ended or is another user's.
    """
    import psutil

    with suppress(psutil.Error):
        return psutil.Process(pid).environ().get(name)
    return None


@contextmanager
def guarded_process(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    *,
    folder: Path,
    grace_s: float = 5.0,
    own_group: bool = False,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command under a guard; with the block it ends, and all that it started.

    Args:
        command: program and arguments.
        log: where its output is appended.
        environment: all of it.
        folder: that it works in.
        grace_s: from SIGTERM to SIGKILL.
        own_group: the terminal's Ctrl-C is not for it.

    Yields:
        The guard: SIGTERM ends the command and what it started in order, SIGKILL all at once.
    """
    with (
        log.open("ab") as output,
        subprocess.Popen(
            guarded(command, grace_s),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            cwd=folder,
            process_group=0 if own_group else None,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(grace_s + KILL_WAIT_S + STOP_MARGIN_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """The environment of this process with these variables; it is as before afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def attempts(limit_s: float, pause_s: float) -> Iterator[None]:
    """Begin now, and again after each pause, until `limit_s` seconds are over."""
    deadline = time.monotonic() + limit_s
    yield
    while time.monotonic() < deadline:
        time.sleep(pause_s)
        yield


def wait_until_ready(
    process: subprocess.Popen[bytes],
    answers: Callable[[], bool],
    what: str,
    log: Path,
    limit_s: float,
) -> None:
    """Wait until a server answers.

    Raises:
        TransientError: it ended before, or did not answer within `limit_s` seconds.
    """
    for _ in attempts(limit_s, READY_POLL_S):
        if answers():
            return
        if process.poll() is not None:
            raise TransientError(
                f"{what} ended with code {process.returncode} before it was ready; its log is {log}"
            )
    raise TransientError(f"{what} did not answer within {limit_s:.0f} s; its log is {log}")


def report_progress(bar: str, done: int, total: int, text: str) -> None:
    """Tell how many of how many steps are done.

    Args:
        bar: what is counted, such as `epochs`; a bar of its own.
        done: steps that are complete.
        total: all steps; work may end before.
        text: what is being done, in a few words.
    """
    PROGRESS.debug("%s", text, extra={"bar": bar, "done": done, "total": total})
