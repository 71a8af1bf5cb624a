"""Keeps batches away from a backend that failed, and says when it may be tried again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Circuit:
    """Closed: batches pass. Open: none does. Half open: one probe is under way.

    Times are of `time.monotonic()`.
    """

    open_s: float = 1.0
    most_open_s: float = 30.0
    reason: str = ""
    """Of the last failure; empty where closed."""
    closed: bool = True
    times_opened: int = 0
    probing: bool = False
    retry_at: float = 0.0
    _next_s: float = 0.0

    def failed(self, reason: str, now: float) -> None:
        """Open it, longer each time until something succeeds."""
        if self.closed:
            self.times_opened += 1
            self._next_s = self.open_s
        else:
            self._next_s = min(self._next_s * 2, self.most_open_s)
        self.closed, self.probing, self.reason = False, False, reason
        self.retry_at = now + self._next_s

    def probe_due(self, now: float) -> bool:
        """Whether a probe should be sent; the one who is told so sends it."""
        if self.closed or self.probing or now < self.retry_at:
            return False
        self.probing = True
        return True

    def healed(self) -> None:
        """The probe was answered."""
        self.closed, self.probing, self.reason = True, False, ""

    @property
    def state(self) -> str:
        """`closed`, `open` or `half_open`."""
        if self.closed:
            return "closed"
        return "half_open" if self.probing else "open"
