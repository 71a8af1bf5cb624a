"""Recording lineage: into the files always, to a collector where one is set."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit

import httpx

from tasks.kernel.settings import ArtifactStore
from tasks.lineage.config import LineageSettings
from tasks.lineage.events import FlowRun, run_id, step_events
from tasks.lineage.journal import Event, Journal
from tasks.lineage.steps import Step

logger = logging.getLogger(__name__)

TIMEOUT_S = 5
FINAL = frozenset(f"HTTP {code}" for code in (400, 409, 413, 415, 422))
"""Answers after which sending the same event again cannot help."""
MAX_WAITING = 20_000
"""Events kept for a collector that does not answer; older ones stay in the files alone."""


@dataclass(frozen=True)
class Recorded:
    """What became of some steps or events."""

    num_new: int
    """Steps, or events of flow runs, written now."""
    num_known: int
    """Steps that the files held already."""
    num_waiting: int
    """Events that the collector has not taken; they are sent again next time."""


def record_steps(
    steps: Iterable[Step],
    parent: FlowRun,
    started: datetime,
    settings: LineageSettings,
    store: ArtifactStore,
    commit: str,
) -> Recorded:
    """Write the steps that the files do not hold yet, and pass them on.

    Raises:
        StorageError: the disk refused a write.
    """
    journal = Journal(settings.folder)
    runs = {run_id(step): step for step in steps}
    with journal.writing():
        known = journal.known_runs()
        new = {run: step for run, step in runs.items() if run not in known}
        events = [
            event
            for step in new.values()
            for event in step_events(step, parent, started, settings, store, commit)
        ]
        journal.append(events, list(new))
        waiting = _pass_on(journal, events, settings)
    num_known = len(runs) - len(new)
    logger.info("lineage: %d step(s) recorded, %d known already", len(new), num_known)
    return Recorded(len(new), num_known, waiting)


def record_events(events: Sequence[Event], settings: LineageSettings) -> Recorded:
    """Write events that are new by nature, such as those of a flow run, and pass them on.

    Raises:
        StorageError: the disk refused a write.
    """
    journal = Journal(settings.folder)
    with journal.writing():
        journal.append(events)
        waiting = _pass_on(journal, events, settings)
    return Recorded(len(events), 0, waiting)


def _pass_on(journal: Journal, events: Sequence[Event], settings: LineageSettings) -> int:
    """Send what waits and what is new, oldest first; stop at the first that is not taken."""
    if not settings.url:
        return 0
    queue = [*journal.outbox, *events]
    num_sent, num_refused, trouble = 0, 0, ""
    key = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    with httpx.Client(headers=key, timeout=TIMEOUT_S) as client:
        for event in queue:
            trouble = _send(client, event, settings)
            if trouble and trouble not in FINAL:
                break
            num_refused += bool(trouble)
            num_sent += 1
    left = queue[num_sent:]
    journal.keep_in_outbox(left[-MAX_WAITING:])
    host = urlsplit(settings.url).hostname
    if num_refused:
        logger.warning("lineage: %s refused %d event(s), kept in the files", host, num_refused)
    if left:
        logger.warning("lineage: %s takes no events (%s); %d wait", host, trouble, len(left))
    return len(left)


def _send(client: httpx.Client, event: Event, settings: LineageSettings) -> str:
    """Post one event; empty where it was taken, else what went wrong, without any address.

    Redirects are not followed: another place than the one that was set gets no events.
    """
    address = f"{str(settings.url).rstrip('/')}/{settings.endpoint.lstrip('/')}"
    try:
        response = client.post(address, json=event)
    except httpx.HTTPError as exc:
        return type(exc).__name__
    return "" if response.is_success else f"HTTP {response.status_code}"
