"""What happened to the ranks of one elastic run: for the log, and recorded with the result."""

from __future__ import annotations

import logging
import time
from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from tasks.contracts.base import Contract

LOGGER = logging.getLogger(__name__)
EventKind = Literal["lost", "left", "straggler", "recovered", "discovery", "waiting"]


class ElasticEvent(Contract):
    """One thing that happened."""

    at_s: NonNegativeFloat
    """Seconds since the start of the run."""
    kind: EventKind
    place: str
    """Which rank's slot or which host; empty where it concerns none."""
    text: str


class GroupRecord(Contract):
    """One group of ranks that trained together."""

    number: PositiveInt
    size: PositiveInt
    places: tuple[str, ...]
    """Slots in rank order."""
    reason: str
    started_s: NonNegativeFloat
    """Seconds since the start of the run until its ranks were told to begin."""
    running_s: NonNegativeFloat | None
    """Until all of them trained; None where they never did."""


class ElasticReport(Contract):
    """The life of one run."""

    groups: tuple[GroupRecord, ...]
    events: tuple[ElasticEvent, ...]
    num_commits: int
    seconds: NonNegativeFloat

    @property
    def stragglers(self) -> tuple[str, ...]:
        """Places that were named as stragglers, in order, each once."""
        named = (event.place for event in self.events if event.kind == "straggler")
        return tuple(dict.fromkeys(named))


WARNINGS = frozenset({"lost", "straggler"})
# A run of months with a host that comes and goes must not fill the memory.
MAX_RECORDS = 10_000


class History:
    """Takes what happens, in order."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._groups: list[GroupRecord] = []
        self._events: list[ElasticEvent] = []
        self._num_groups = 0
        self._num_commits = 0

    def note(self, kind: EventKind, place: str, text: str) -> None:
        """Something happened; `text` is a sentence."""
        level = logging.WARNING if kind in WARNINGS else logging.INFO
        LOGGER.log(level, "%s", text)
        self._events.append(ElasticEvent(at_s=self._now(), kind=kind, place=place, text=text))
        del self._events[:-MAX_RECORDS]

    def group_starts(self, places: tuple[str, ...], reason: str) -> None:
        """Ranks are told to form a group; `places` are theirs in rank order."""
        self._num_groups += 1
        LOGGER.info(
            "group %d: %d rank(s) (%s): %s",
            self._num_groups,
            len(places),
            ", ".join(places),
            reason,
        )
        self._groups.append(
            GroupRecord(
                number=self._num_groups,
                size=len(places),
                places=places,
                reason=reason,
                started_s=self._now(),
                running_s=None,
            )
        )
        del self._groups[:-MAX_RECORDS]

    def group_runs(self) -> None:
        """All ranks of the newest group train."""
        self._groups[-1] = self._groups[-1].model_copy(update={"running_s": self._now()})

    def commits(self, number: int) -> None:
        """A rank has committed for the `number`th time."""
        self._num_commits = max(self._num_commits, number)

    def texts(self, kind: EventKind) -> list[str]:
        """Sentences of one kind, in order."""
        return [event.text for event in self._events if event.kind == kind]

    def report(self) -> ElasticReport:
        """All of it."""
        return ElasticReport(
            groups=tuple(self._groups),
            events=tuple(self._events),
            num_commits=self._num_commits,
            seconds=self._now(),
        )

    def _now(self) -> float:
        return time.monotonic() - self._started
