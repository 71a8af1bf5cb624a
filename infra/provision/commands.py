"""Long commands: each with a log, shown as numbered lines with the seconds they took."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LINES_SHOWN = 20
LINE_LENGTH = 300  # a compiler's command line has thousands of characters


class SetupError(Exception):
    """Set-up cannot continue; the message has what was seen and what to do."""


@dataclass
class Step:
    """What becomes of one step."""

    outcome: str = "done"


@dataclass
class Progress:
    """Numbers the steps, one line each."""

    total: int
    number: int = 0

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Show one step; it ends as `stopped` when its body raises."""
        self.number += 1
        print(f"[{self.number}/{self.total}] {title}", end=" ... ", flush=True)
        step, started = Step(), time.monotonic()
        try:
            yield step
        except BaseException:
            step.outcome = "stopped"
            raise
        finally:
            print(f"{step.outcome} ({time.monotonic() - started:.1f} s)", flush=True)


@dataclass(frozen=True)
class Commands:
    """Runs commands with one environment; each one's output goes to a log of its own.

    They inherit set-up's locks: should set-up be killed, the next one waits for what still runs.
    """

    logs: Path
    environment: Mapping[str, str]
    cwd: Path
    held_locks: tuple[int, ...]

    def run(self, what: str, command: Sequence[str | Path]) -> str:
        """Run one command to its end and return its output.

        Raises:
            SetupError: it failed; the message has the log's path and its last lines.
        """
        log = self.logs / f"{what.replace(' ', '-')}.log"
        try:
            with log.open("wb") as output:
                done = subprocess.run(
                    command,
                    check=False,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(self.environment),
                    cwd=self.cwd,
                    pass_fds=self.held_locks,
                )
        except OSError as exc:
            raise SetupError(f"{what} failed: {command[0]}: {exc.strerror}") from exc
        text = log.read_text(encoding="utf-8", errors="replace")
        if done.returncode:
            lines = [line[:LINE_LENGTH] for line in text.splitlines() if line.strip()]
            raise SetupError(
                f"{what} failed with exit code {done.returncode}; what was downloaded is kept. The "
                f"end of {log}:\n" + "\n".join(lines[-LINES_SHOWN:])
            )
        return text
