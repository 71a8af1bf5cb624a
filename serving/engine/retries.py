"""What is remembered of a version that could not be loaded, and when it is tried again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """A failed load. Times are of `time.monotonic()`."""

    reason: str
    digest: str
    """Of what could not be loaded; when it changes, it may be tried at once."""
    attempts: int
    retry_at: float

    @classmethod
    def after(
        cls,
        former: Failure | None,
        reason: str,
        digest: str,
        now: float,
        first_s: float,
        most_s: float,
    ) -> Failure:
        """One more failure: the delay doubles each time, up to `most_s`."""
        attempts = 1 if former is None else former.attempts + 1
        delay = min(most_s, first_s * 2.0 ** min(attempts - 1, 30))
        return cls(reason, digest, attempts, now + delay)
