"""Long commands: run under the guard, logged, shown as numbered lines, explained if they fail."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")
REPORT_EVERY_S = 30.0  # where there is no terminal to draw on
LINES_SHOWN = 12
LINES_SEARCHED = 60
LINE_LENGTH = 300  # a compiler's command line has thousands of characters


class SetupError(Exception):
    """Set-up cannot continue; the message has what was seen and what to do."""


DISK_FULL = "the disk is full. Free some space and run again; finished downloads are kept"
WRITE_REFUSED = (
    "a write was refused. Set-up must be able to write to the checkout and to the folder for caches"
)
CAUSES = {
    ("No space left on device", "Disk quota exceeded"): DISK_FULL,
    ("Hash mismatch", "DO NOT MATCH THE HASHES"): (
        "a downloaded file is not the one that was tested (its digest differs), and was not "
        "installed. The download broke, or the registry serves another file: run again; if it "
        "stays, compare the file with its publisher's before running `make lock`"
    ),
    ("Read-only file system", "Permission denied"): WRITE_REFUSED,
    ("Killed signal terminated program", "Cannot allocate memory"): (
        "the machine ran out of memory. Close other programs and run again"
    ),
    (
        *("dns error", "Temporary failure in name resolution", "Name or service not known"),
        *("error sending request", "Failed to establish a new connection", "timed out"),
        *("Connection refused", "Could not connect", "ProxyError", "CERTIFICATE_VERIFY_FAILED"),
    ): (
        "the package registry cannot be reached. Check the network, the proxy and pip's settings "
        "(`pip config list`), and run again; finished downloads are kept"
    ),
    ("No matching distribution found", "No solution found"): (
        "the package registry lacks a version that the lock names. Check pip's settings "
        "(`pip config list`)"
    ),
}
"""What certain words in the output of a failed command mean; the first that fits counts."""


def cause_of(log: str) -> str:
    """The first known cause whose words are in the last lines of a log."""
    end = tail(log, LINES_SEARCHED)
    found = (text for marks, text in CAUSES.items() if any(mark in end for mark in marks))
    return next(found, "the end of its log shows why")


def explained(error: OSError) -> str:
    """What an operating-system error met by set-up itself means."""
    location = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return location + DISK_FULL
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return location + WRITE_REFUSED
    return f"{location}{error.strerror or error}"


def tail(text: str, lines: int) -> str:
    """The last lines that are not blank."""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


def main_lines(log: str) -> str:
    """The first errors in a log and its last lines; long ones are cut."""
    lines = [line for line in log.splitlines() if line.strip()]
    last = lines[-LINES_SHOWN:]
    errors = [line for line in lines[:-LINES_SHOWN] if re.search(r"\berror: |cannot open", line)]
    shown = [*errors[:LINES_SHOWN], *(["..."] if errors else []), *last]
    return "\n".join(line[:LINE_LENGTH] for line in shown)


def percent_done(log: Path) -> str:
    """The compiler's progress, from the end of a build log; empty where it shows none."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 20_000))
        found = re.findall(rb"\[ *(\d+)%\]", stream.read())
    return f"{int(found[-1])} %" if found else ""


@dataclass
class Step:
    """One line; a terminal sees its seconds run, a log file gets them now and then."""

    title: str
    outcome: str = "done"
    started: float = field(default_factory=time.monotonic)
    reported: float = 0.0
    status: str = ""

    def __post_init__(self) -> None:
        self.live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._draw(self.title)

    def tick(self, detail: str = "") -> None:
        """Show the seconds so far; called often."""
        elapsed = time.monotonic() - self.started
        status = f" ... {elapsed:.0f} s" + (f", {detail}" if detail else "")
        if self.live and status != self.status:
            self.status = status
            room = shutil.get_terminal_size().columns - 1  # a line that wraps cannot be drawn over
            self._draw(self.title[: max(0, room - len(status))] + status)
        elif not self.live and elapsed - self.reported >= REPORT_EVERY_S:
            self.reported = elapsed
            print(status, end="", flush=True)

    def finish(self) -> None:
        """End the line with the outcome and the time taken."""
        taken = f"{self.outcome} ({time.monotonic() - self.started:.1f} s)"
        if self.live:
            self._draw(f"{self.title}: {taken}")
            print(flush=True)
        else:
            print(f" ... {taken}", flush=True)

    def _draw(self, text: str) -> None:
        """Write over the line; a log file gets no such signs."""
        print(f"\r{text}\x1b[K" if self.live else text, end="", flush=True)


@dataclass
class Progress:
    """Numbers the steps."""

    total: int
    number: int = 0

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Show one step; it ends as `stopped` when its body raises."""
        self.number += 1
        step = Step(f"[{self.number}/{self.total}] {title}")
        try:
            yield step
        except BaseException:
            step.outcome = "stopped"
            raise
        finally:
            step.finish()


@dataclass(frozen=True)
class Commands:
    """Runs commands with one environment; each one's output goes to a log of its own."""

    logs: Path
    environment: Mapping[str, str]
    cwd: Path
    held_locks: tuple[int, ...]

    def run(self, what: str, command: Sequence[str | Path], step: Step) -> str:
        """Run one command to its end and return its output.

        Raises:
            SetupError: it failed; the message has the cause, the log's path and its main lines.
        """
        log = self.logs / f"{what.replace(' ', '-')}.log"
        code = self._run_logged(command, log, step)
        text = log.read_text(encoding="utf-8", errors="replace")
        if code:
            raise SetupError(
                f"{what} failed with exit code {code}: {cause_of(text)}.\n"
                f"Full log: {log}\nFrom it:\n{main_lines(text)}"
            )
        return text

    def _run_logged(self, command: Sequence[str | Path], log: Path, step: Step) -> int:
        with (
            log.open("wb") as output,
            subprocess.Popen(
                [sys.executable, "-I", str(GUARD), *map(str, command)],
                stdin=subprocess.PIPE,  # closed when this process ends: the guard's sign
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(self.environment),
                cwd=self.cwd,
                pass_fds=self.held_locks,
                start_new_session=True,  # a terminal's interrupt reaches set-up alone
            ) as process,
        ):
            while process.poll() is None:
                step.tick(percent_done(log))
                time.sleep(0.1)
        return process.returncode
