"""What happened to the ranks of one elastic run: for the log, and recorded with the result."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from tasks.contracts.base import Contract

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
