"""Run long commands under the guard, logged, and say in a sentence why one failed."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.provision.progress import Step

GUARD = Path(__file__).with_name("guard.py")
LINES_SHOWN = 12
LINES_SEARCHED = 60
LINE_LENGTH = 300  # a compiler's command line has thousands of characters


class SetupError(Exception):
    """Set-up cannot go on; the text says what was seen and what to do."""


class CommandError(SetupError):
    """A command failed for a reason that another way of doing the same need not share."""


@dataclass(frozen=True)
class Cause:
    """What certain words in a failed command's output mean; `final`: another way won't help."""

    marks: tuple[str, ...]
    sentence: str
    final: bool


DISK_FULL = "the disk is full. Free some space and run again; finished downloads are kept"
WRITE_REFUSED = (
    "a write was refused. Set-up must be able to write to the checkout and to the folder for caches"
)
UNKNOWN = Cause((), "the end of its log says why", final=False)
CAUSES = (
    Cause(("No space left on device", "Disk quota exceeded"), DISK_FULL, final=True),
    Cause(
        ("Hash mismatch", "DO NOT MATCH THE HASHES"),
        "a downloaded file is not the one that was tested (its digest differs), and was not "
        "installed. The download broke, or the registry serves another file: run again; if it "
        "stays, compare the file with its publisher's before running `make lock`",
        final=True,
    ),
    Cause(("Read-only file system", "Permission denied"), WRITE_REFUSED, final=True),
    Cause(
        ("Killed signal terminated program", "Cannot allocate memory"),
        "the machine ran out of memory. Close other programs and run again",
        final=True,
    ),
    Cause(
        (
            *("dns error", "Temporary failure in name resolution", "Name or service not known"),
            *("error sending request", "Failed to establish a new connection", "timed out"),
            *("Connection refused", "Could not connect", "ProxyError", "CERTIFICATE_VERIFY_FAILED"),
        ),
        "the package registry cannot be reached. Check the network, the proxy and pip's settings "
        "(`pip config list`), and run again; finished downloads are kept",
        final=False,
    ),
    Cause(
        ("No matching distribution found", "No solution found"),
        "the package registry lacks a version that the lock names. Check pip's settings "
        "(`pip config list`)",
        final=False,
    ),
)


def cause_of(log: str) -> Cause:
    """The first known cause whose words stand in the last lines of a log."""
    end = tail(log, LINES_SEARCHED)
    return next((cause for cause in CAUSES if any(mark in end for mark in cause.marks)), UNKNOWN)


def sentence_for(error: OSError) -> str:
    """What an operating-system error met by set-up itself means."""
    place = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return place + DISK_FULL
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return place + WRITE_REFUSED
    return f"{place}{error.strerror or error}"


def tail(text: str, lines: int) -> str:
    """The last lines that are not blank."""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


def telling_lines(log: str) -> str:
    """The first errors that a log speaks of and its last lines; long ones are cut."""
    lines = [line for line in log.splitlines() if line.strip()]
    last = lines[-LINES_SHOWN:]
    errors = [line for line in lines[:-LINES_SHOWN] if re.search(r"\berror: |cannot open", line)]
    shown = [*errors[:LINES_SHOWN], *(["..."] if errors else []), *last]
    return "\n".join(line[:LINE_LENGTH] for line in shown)


def percent_done(log: Path) -> str:
    """How far the compiler says it is, from the end of a build log; empty where it says nothing."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 20_000))
        found = re.findall(rb"\[ *(\d+)%\]", stream.read())
    return f"{int(found[-1])} %" if found else ""


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
            SetupError: it failed; the text gives the cause, the log's place and its telling lines.
            CommandError: the same, for a cause that is not final.
        """
        log = self.logs / f"{what.replace(' ', '-')}.log"
        code = self._run_logged(command, log, step)
        text = log.read_text(encoding="utf-8", errors="replace")
        if code:
            cause = cause_of(text)
            kind = SetupError if cause.final else CommandError
            raise kind(
                f"{what} failed with exit code {code}: {cause.sentence}.\n"
                f"Full log: {log}\nFrom it:\n{telling_lines(text)}"
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
