"""What happened to the ranks of one elastic run: for the log, and recorded with the result."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from tasks.contracts.base import Contract

LOGGER = logging.getLogger(__name__)
EventKind = Literal["lost", "left", "straggler"]
# A run of months with a host that comes and goes must not fill the memory.
MAX_RECORDS = 10_000
# How many looks in a row a rank must be slow to be named as a straggler.
LOOKS = 3
# To the median of the others, from which a rank is named: half a speed is worth a look.
RATIO = 2.0
# Smaller times differ by chance.
BUSY_FLOOR_S = 2e-3


class ElasticEvent(Contract):
    """One thing that happened."""

    at_s: NonNegativeFloat
    """Seconds since the start of the run."""
    kind: EventKind
    place: str
    """Which rank's slot."""
    text: str


class GroupRecord(Contract):
    """One group of ranks that trained together."""

    number: PositiveInt
    size: PositiveInt
    places: tuple[str, ...]
    """Slots in rank order."""
    reason: str
    started_s: NonNegativeFloat
    """Seconds since the start of the run until its ranks were asked to begin."""


class ElasticReport(Contract):
    """The life of one run."""

    groups: tuple[GroupRecord, ...]
    events: tuple[ElasticEvent, ...]
    num_commits: int
    seconds: NonNegativeFloat


class History:
    """Takes what happens, in order."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._groups: deque[GroupRecord] = deque(maxlen=MAX_RECORDS)
        self._events: deque[ElasticEvent] = deque(maxlen=MAX_RECORDS)
        self.num_groups = 0
        self.num_commits = 0

    def note(self, kind: EventKind, place: str, text: str) -> None:
        """Something happened; `text` is a sentence."""
        LOGGER.log(logging.INFO if kind == "left" else logging.WARNING, "%s", text)
        self._events.append(ElasticEvent(at_s=self._now(), kind=kind, place=place, text=text))

    def group_starts(self, places: tuple[str, ...], reason: str) -> None:
        """Ranks are asked to form a group; `places` are theirs in rank order."""
        self.num_groups += 1
        number, size, slots = self.num_groups, len(places), ", ".join(places)
        LOGGER.info("group %d: %d rank(s) (%s): %s", number, size, slots, reason)
        self._groups.append(
            GroupRecord(
                number=number, size=size, places=places, reason=reason, started_s=self._now()
            )
        )

    @property
    def losses(self) -> list[str]:
        """Sentences about ranks that were lost, in order."""
        return [event.text for event in self._events if event.kind == "lost"]

    def report(self) -> ElasticReport:
        """All of it."""
        return ElasticReport(
            groups=tuple(self._groups),
            events=tuple(self._events),
            num_commits=self.num_commits,
            seconds=self._now(),
        )

    def _now(self) -> float:
        return time.monotonic() - self._started


class StragglerWatch:
    """Compares each rank's own work in a step with the median of the others.

    Step times themselves show nothing: ranks wait for each other in every step, so all are as slow
    as the slowest.
    """

    def __init__(self) -> None:
        self.busy_s: dict[str, float] = {}
        """Place of each rank to its mean seconds of own work in a step."""
        self._streaks: dict[str, int] = {}
        """Looks in a row in which a rank was slow."""

    def forget(self, place: str) -> None:
        """A rank is gone."""
        self.busy_s.pop(place, None)
        self._streaks.pop(place, None)

    def look(self) -> dict[str, str]:
        """Place of each rank that has been slow often enough just now, and a sentence about it."""
        found = {}
        for place, busy_s in self.busy_s.items():
            others = [value for other, value in self.busy_s.items() if other != place]
            median_s = statistics.median(others) if others else busy_s
            is_slow = busy_s >= RATIO * max(median_s, BUSY_FLOOR_S)
            self._streaks[place] = self._streaks.get(place, 0) + 1 if is_slow else 0
            if self._streaks[place] == LOOKS:
                found[place] = (
                    f"{place} is a straggler: it works {1e3 * busy_s:.1f} ms a step itself, "
                    f"{busy_s / max(median_s, 1e-9):.1f} times as long as the others' median; look "
                    "for other load, heat or a slow disk on it, or leave it out of the hosts"
                )
        return found
