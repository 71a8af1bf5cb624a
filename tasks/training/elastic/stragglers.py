"""Finds the rank that makes the others wait."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

# How many looks in a row a rank must be slow to be named, and quick to be forgotten.
LOOKS = 3
# To the median of the others, from which a rank is named: half a speed is worth a look.
RATIO = 2.0
# A rank that was named is forgotten below this share of the ratio: no flicker at the edge.
RELEASE_SHARE = 0.75
# Smaller values differ by chance.
BUSY_FLOOR_S = 2e-3
LINK_FLOOR_S = 20e-3
NUM_PINGS = 7


@dataclass(frozen=True)
class Straggler:
    """A rank that is named, or no longer."""

    place: str
    found: bool
    """False where it has recovered."""
    text: str


@dataclass
class _Measure:
    what: str
    advice: str
    floor_s: float
    streaks: dict[str, int] = field(default_factory=dict)
    """Looks in a row in which a rank was slow; negative: quick."""
    named: set[str] = field(default_factory=set)


class StragglerWatch:
    """Compares each rank's own work in a step, and its link, with the median of the others.

    Step times themselves tell nothing: ranks wait for each other in every step, so all are as slow
    as the slowest. A rank is named from `RATIO` times the others' median on.
    """

    def __init__(self) -> None:
        self._busy_s: dict[str, float] = {}
        self._link_s: dict[str, deque[float]] = {}
        self._busy = _Measure(
            "works {0:.1f} ms a step itself, {1:.1f} times as long as the others' median of "
            "{2:.1f} ms",
            "look for other load, heat or a slow disk on it, or leave it out of the hosts",
            BUSY_FLOOR_S,
        )
        self._link = _Measure(
            "answers after {0:.1f} ms, {1:.1f} times as late as the others' median of {2:.1f} ms",
            "look at its network link, or leave it out of the hosts",
            LINK_FLOOR_S,
        )

    def note_busy(self, place: str, busy_s: float) -> None:
        """A rank's mean seconds of own work in a step."""
        self._busy_s[place] = busy_s

    def note_link(self, place: str, round_trip_s: float) -> None:
        """Seconds from a ping to its answer."""
        self._link_s.setdefault(place, deque(maxlen=NUM_PINGS)).append(round_trip_s)

    def forget(self, place: str) -> None:
        """A rank is gone."""
        for values in (self._busy_s, self._link_s, self._busy.streaks, self._link.streaks):
            values.pop(place, None)
        self._busy.named.discard(place)
        self._link.named.discard(place)

    def look(self) -> list[Straggler]:
        """Ranks that are named or have recovered since the last look."""
        links = {
            place: statistics.median(pings)
            for place, pings in self._link_s.items()
            if len(pings) == NUM_PINGS
        }
        return self._judge(self._busy, self._busy_s) + self._judge(self._link, links)

    def _judge(self, measure: _Measure, values: Mapping[str, float]) -> list[Straggler]:
        changed = []
        for place, value in values.items():
            others = [v for other, v in values.items() if other != place]
            if not others:
                continue
            median = statistics.median(others)
            ratio, streak = value / max(median, measure.floor_s), measure.streaks.get(place, 0)
            if ratio >= RATIO:
                streak = max(streak, 0) + 1
            else:
                streak = min(streak, 0) - 1 if ratio < RELEASE_SHARE * RATIO else 0
            measure.streaks[place] = streak
            if streak >= LOOKS and place not in measure.named:
                measure.named.add(place)
                seen = measure.what.format(1e3 * value, value / max(median, 1e-9), 1e3 * median)
                text = f"{place} is a straggler: it {seen}; {measure.advice}"
                changed.append(Straggler(place, True, text))
            elif streak <= -LOOKS and place in measure.named:
                measure.named.remove(place)
                changed.append(Straggler(place, False, f"{place} has caught up"))
        return changed
