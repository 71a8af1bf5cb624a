"""Mean and maximum of a stream of numbers, without keeping them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Running:
    """What has been seen so far; `mean` and `highest` are None before the first number."""

    total: float = 0.0
    count: int = 0
    latest: float | None = None
    highest: float | None = None

    def add(self, value: float) -> None:
        """Take one number."""
        self.total += value
        self.count += 1
        self.latest = value
        self.highest = value if self.highest is None else max(self.highest, value)

    @property
    def mean(self) -> float | None:
        """Of all numbers."""
        return self.total / self.count if self.count else None
