"""Places that failed rest for a while, longer after each failure."""

from __future__ import annotations


class Cooldown:
    """Keeps slots and hosts from being used again too soon.

    Args:
        shortest_s: rest after a first failure.
        longest_s: bound of the doubling; a place that has been used for so long without a failure
            starts anew.
    """

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s = shortest_s
        self._longest_s = longest_s
        self._num_failures: dict[str, int] = {}
        self._rests_until: dict[str, float] = {}

    def punish(self, place: str, now: float) -> float:
        """Note a failure of `place`; returns the seconds of its rest."""
        if now - self._rests_until.get(place, now) > self._longest_s:
            self._num_failures.pop(place, None)
        doublings = self._num_failures.get(place, 0)
        self._num_failures[place] = doublings + 1
        rest_s = self._shortest_s
        while doublings and rest_s < self._longest_s:  # no power: it may overflow
            rest_s, doublings = 2 * rest_s, doublings - 1
        rest_s = min(rest_s, self._longest_s)
        self.rest(place, rest_s, now)
        return rest_s

    def rest(self, place: str, rest_s: float, now: float) -> None:
        """Let `place` rest without holding anything against it."""
        self._rests_until[place] = max(now + rest_s, self._rests_until.get(place, 0.0))

    def is_resting(self, place: str, now: float) -> bool:
        """True where `place` must not be used yet."""
        return now < self._rests_until.get(place, 0.0)
