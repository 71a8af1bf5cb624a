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

    def __post_init__(self) -> None:
        self.live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._show(f"{self.title} ...")

    def tick(self, detail: str = "") -> None:
        """Show the seconds so far; called often."""
        elapsed = time.monotonic() - self.started
        if self.live:
            self._show(f"{self.title} ... {elapsed:.0f} s  {detail}")
        elif elapsed - self.reported >= REPORT_EVERY_S:
            self.reported = elapsed
            self._show(f" {elapsed:.0f} s, {detail} ..." if detail else f" {elapsed:.0f} s ...")

    def finish(self) -> None:
        """End the line with the outcome and the time taken."""
        taken = f"{self.outcome} ({time.monotonic() - self.started:.1f} s)"
        self._show(f"{self.title}: {taken}" if self.live else f" {taken}", end="\n")

    def _show(self, text: str, end: str = "") -> None:
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            shown = text if end else text[:width]  # a line that wraps could not be drawn over
            text = f"\r{shown}\x1b[K"
        print(text, end=end, flush=True)


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
