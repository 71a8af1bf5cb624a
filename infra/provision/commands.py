"""Long commands: each with a log, shown as numbered lines with the seconds they take."""

from __future__ import annotations

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

REPORT_EVERY_S = 30.0  # where there is no terminal to draw on
LINES_SHOWN = 20
LINE_LENGTH = 300  # a compiler's command line has thousands of characters


class SetupError(Exception):
    """Set-up cannot continue; the message has what was seen and what to do."""


@dataclass
class Step:
    """One line; a terminal sees its seconds run, a log file gets them now and then."""

    title: str
    outcome: str = "done"
    started: float = field(default_factory=time.monotonic)
    reported: float = 0.0

    def __post_init__(self) -> None:
        self.live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._draw(self.title)

    def tick(self, detail: str = "") -> None:
        """Show the seconds so far; called often."""
        elapsed = time.monotonic() - self.started
        status = f" ... {elapsed:.0f} s" + (f", {detail}" if detail else "")
        if self.live:
            room = shutil.get_terminal_size().columns - 1  # a line that wraps cannot be drawn over
            self._draw(self.title[: max(0, room - len(status))] + status)
        elif elapsed - self.reported >= REPORT_EVERY_S:
            self.reported = elapsed
            print(status, end="", flush=True)

    def finish(self) -> None:
        """End the line with the outcome and the time taken."""
        taken = f"{self.outcome} ({time.monotonic() - self.started:.1f} s)"
        if self.live:
            self._draw(f"{self.title}: {taken}")
        print("" if self.live else f" ... {taken}", flush=True)

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
    """Runs commands with one environment; each one's output goes to a log of its own.

    They inherit set-up's locks: should set-up be killed, the next one waits for what still runs.
    """

    logs: Path
    environment: Mapping[str, str]
    cwd: Path
    held_locks: tuple[int, ...]

    def run(self, what: str, command: Sequence[str | Path], step: Step) -> str:
        """Run one command to its end and return its output.

        Raises:
            SetupError: it failed; the message has the log's path and its last lines.
        """
        log = self.logs / f"{what.replace(' ', '-')}.log"
        try:
            code = self._run_logged(command, log, step)
        except OSError as exc:
            raise SetupError(f"{what} failed: {command[0]}: {exc.strerror}") from exc
        text = log.read_text(encoding="utf-8", errors="replace")
        if code:
            lines = [line[:LINE_LENGTH] for line in text.splitlines() if line.strip()]
            raise SetupError(
                f"{what} failed with exit code {code}; what was downloaded is kept. The end of "
                f"{log}:\n" + "\n".join(lines[-LINES_SHOWN:])
            )
        return text

    def _run_logged(self, command: Sequence[str | Path], log: Path, step: Step) -> int:
        with (
            log.open("wb") as output,
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(self.environment),
                cwd=self.cwd,
                pass_fds=self.held_locks,
            ) as process,
        ):
            try:
                while process.poll() is None:
                    step.tick(percent_done(log))
                    time.sleep(0.1)
            except BaseException:
                process.kill()
                raise
        return process.returncode


def percent_done(log: Path) -> str:
    """The compiler's progress, from the end of a build log; empty where it shows none."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 20_000))
        found = re.findall(rb"\[ *(\d+)%\]", stream.read())
    return f"{int(found[-1])} %" if found else ""
