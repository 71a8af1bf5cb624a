"""Numbered lines on the screen, one a step: what, how long so far, and how it ended."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

REPORT_EVERY_S = 30.0  # where there is no terminal to draw on


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
