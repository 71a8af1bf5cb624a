"""What happened to the ranks of one elastic run: for the log, and recorded with the result."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from tasks.contracts.base import Contract

LOGGER = logging.getLogger(__name__)
EventKind = Literal["lost", "left"]
# A run of months with a host that comes and goes must not fill the memory.
MAX_RECORDS = 10_000


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
