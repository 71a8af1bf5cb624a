"""Keeps what happens to the ranks of an elastic run, and says it in the log."""

from __future__ import annotations

import logging
import time

from tasks.training.elastic.report import ElasticEvent, ElasticReport, EventKind, GroupRecord

LOGGER = logging.getLogger(__name__)
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
