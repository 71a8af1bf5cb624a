"""How far a run is, how fast, and how long it will take: one line from what the ranks report."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_S = 60.0
"""The speed is that of the last minute: a machine that got busy shows within it."""
MIN_SPAN_S = 2.0
LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class Position:
    """Steps that are done. `epoch` counts from 0, `step` those done in it."""

    epoch: int
    step: int


class Eta:
    """Turns positions into lines; the time of validation and checkpoints counts like any other.

    Args:
        num_epochs: epochs of the run, unless it stops early.
        steps_per_epoch: the same for all epochs.
        rows_per_step: rows of the global batch.
    """

    def __init__(self, num_epochs: int, steps_per_epoch: int, rows_per_step: int) -> None:
        self._num_epochs = num_epochs
        self._steps_per_epoch = steps_per_epoch
        self._rows_per_step = rows_per_step
        self._seen: deque[tuple[float, int]] = deque()
        self._said_at: float | None = None

    def line(self, now_s: float, position: Position) -> str | None:
        """A line about the run, or None where the last one is fresh enough.

        There is one every ten seconds, none before the speed is known. After a position that lies
        before the last (a rank was lost, the run went on from a checkpoint) the speed is measured
        anew.

        Args:
            now_s: of a clock that never goes back.
            position: of the rank that is furthest behind, or of any.
        """
        done = self._note(now_s, position)
        steps_per_s = self._steps_per_s()
        is_due = self._said_at is None or now_s - self._said_at >= LINE_EVERY_S
        if steps_per_s is None or not is_due:
            return None
        self._said_at = now_s
        left_s = (self._num_epochs * self._steps_per_epoch - done) / steps_per_s
        return (
            f"epoch {position.epoch + 1} of {self._num_epochs}, step {position.step} of "
            f"{self._steps_per_epoch}, {steps_per_s * self._rows_per_step:,.0f} rows/s, about "
            f"{duration(left_s)} left"
        )

    def _note(self, now_s: float, position: Position) -> int:
        """Remember what was seen; returns the steps that are done in all."""
        done = position.epoch * self._steps_per_epoch + position.step
        if self._seen and done < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now_s, done))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()
        return done

    def _steps_per_s(self) -> float | None:
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        if last_s - first_s < MIN_SPAN_S or last == first:
            return None
        return (last - first) / (last_s - first_s)


def duration(seconds: float) -> str:
    """About how long, in the two units that matter: `40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{round(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
