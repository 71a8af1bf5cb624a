"""The lineage files of an installation, and a collector that gets the same events.

`events-<day>.jsonl` holds the events and is only ever appended to; `runs.txt` holds the id of every
finished step in them. The ids are written after the events: whoever is killed in between writes
some events twice, under the same run ids, which OpenLineage's readers take as one.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tasks.governance.policy import require_placements
from tasks.kernel.errors import ConfigurationError, refused_writes_explained
from tasks.kernel.files import write_atomically
from tasks.kernel.settings import Settings, append, bring
from tasks.kernel.values import is_loopback
from tasks.lineage.events import FlowRun, run_id, step_events
from tasks.lineage.steps import Step
from tasks.metadata.database import held_everywhere

logger = logging.getLogger(__name__)

RUNS, OUTBOX, LOCK = "runs.txt", "outbox.jsonl", "lock"
ENDPOINT = "api/v1/lineage"
TIMEOUT_S = 5
FINAL = frozenset(f"HTTP {code}" for code in (400, 409, 413, 415, 422))
"""Answers after which sending the same event again cannot help."""
MAX_WAITING = 20_000
"""Events kept for a collector that does not answer; older ones stay in the files alone."""

Event = dict[str, Any]


@dataclass(frozen=True)
class LineageSettings:
    """Lineage of one installation. Files are always written; a collector gets the events too."""

    folder: Path
    namespace: str = "falaj"
    url: str | None = None
    api_key: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> LineageSettings:
        """Read `FALAJ_LINEAGE_NAMESPACE`, `OPENLINEAGE_URL` and `OPENLINEAGE_API_KEY`.

        Raises:
            ConfigurationError: the address is none, holds a password, or would send the key
                unencrypted to another machine.
            PlacementRefusedError: what is known of the data may not be there.
        """
        env = os.environ if environment is None else environment
        url, key = env.get("OPENLINEAGE_URL") or None, env.get("OPENLINEAGE_API_KEY") or None
        settings = Settings.from_environment(env)
        if url:
            _check_address(url, key)
            require_placements(settings, environment=env)
        return cls(
            folder=settings.home / "lineage",
            namespace=env.get("FALAJ_LINEAGE_NAMESPACE") or cls.namespace,
            url=url,
            api_key=key,
        )


def _check_address(url: str, key: str | None) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(
            "OPENLINEAGE_URL is no address of a collector; expected https://<host>. Unset it to "
            "write files alone"
        )
    if parts.username or parts.password:
        raise ConfigurationError(
            "OPENLINEAGE_URL holds a user or password, which would appear in logs; give a key in "
            "OPENLINEAGE_API_KEY"
        )
    if key and parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ConfigurationError(
            f"OPENLINEAGE_URL names {parts.hostname} over http, and OPENLINEAGE_API_KEY would "
            "travel readable; use https"
        )


class Journal:
    """The lineage files under one folder; the folder is made by the first write.

    Args:
        settings: folder and collector, or the folder alone.
    """

    def __init__(self, settings: LineageSettings | Path) -> None:
        self.settings = LineageSettings(settings) if isinstance(settings, Path) else settings
        self.folder = self.settings.folder

    def record_steps(
        self, steps: Iterable[Step], parent: FlowRun, started: datetime, commit: str
    ) -> int:
        """Write the steps that the files do not hold yet, and send them; returns how many.

        Raises:
            StorageError: the disk refused a write.
        """
        runs = {run_id(step): step for step in steps}
        with refused_writes_explained(self.folder), held_everywhere(self.folder / LOCK):
            file = bring(self.folder / RUNS)
            known = {*file.read_text(errors="replace").split()} if file.exists() else set()
            new = {run: step for run, step in runs.items() if run not in known}
            namespace = self.settings.namespace
            self._append(
                event
                for step in new.values()
                for event in step_events(step, parent, started, namespace, commit)
            )
            if new:
                append(file, list(new))
        logger.info("lineage: %d step(s) recorded, %d known", len(new), len(runs) - len(new))
        return len(new)

    def record(self, events: Iterable[Event]) -> None:
        """Write events that are new by nature, such as those of a flow run, and send them.

        Raises:
            StorageError: the disk refused a write.
        """
        with refused_writes_explained(self.folder), held_everywhere(self.folder / LOCK):
            self._append(events)

    def events(self) -> Iterator[Event]:
        """All events, oldest first. Spoilt lines are passed over; a warning counts them."""
        for file in sorted(bring(self.folder).glob("events-*.jsonl")):
            yield from _events_in(file)

    @property
    def outbox(self) -> list[Event]:
        """Events that the collector has not taken yet."""
        file = self.folder / OUTBOX
        return list(_events_in(file)) if file.exists() else []

    def _append(self, given: Iterable[Event]) -> None:
        events = list(given)
        if events:
            name = f"events-{datetime.now(UTC):%Y-%m-%d}.jsonl"
            append(self.folder / name, [json.dumps(each, sort_keys=True) for each in events])
        if self.settings.url:
            self._send([*self.outbox, *events])

    def _send(self, queue: Sequence[Event]) -> None:
        """Send events, oldest first; keep them from the first on that is not taken."""
        num_sent, num_refused, trouble = 0, 0, ""
        url, key = urlsplit(str(self.settings.url)), self.settings.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(headers=headers, timeout=TIMEOUT_S) as client:
            for event in queue:
                trouble = _post(client, f"{url.geturl().rstrip('/')}/{ENDPOINT}", event)
                if trouble and trouble not in FINAL:
                    break
                num_refused += bool(trouble)
                num_sent += 1
        waiting = queue[num_sent:]
        if waiting or (self.folder / OUTBOX).exists():
            lines = [json.dumps(event, sort_keys=True) + "\n" for event in waiting[-MAX_WAITING:]]
            write_atomically(self.folder / OUTBOX, "".join(lines))
        if waiting or num_refused:
            logger.warning(
                "lineage: %s refused %d event(s), %d wait for it (%s); all are in the files",
                url.hostname, num_refused, len(waiting), trouble or "others were taken",
            )  # fmt: skip


def _post(client: httpx.Client, address: str, event: Event) -> str:
    """Post one event; empty where it was taken, else what went wrong, without any address.

    Redirects are not followed: another place than the one that was set gets no events.
    """
    try:
        response = client.post(address, json=event)
    except httpx.HTTPError as exc:
        return type(exc).__name__
    return "" if response.is_success else f"HTTP {response.status_code}"


def _events_in(file: Path) -> Iterator[Event]:
    """Events of one file. A line that was cut off, or is no JSON object, is none."""
    num_spoilt = 0
    for line in file.read_bytes().splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict):
            yield event
        else:
            num_spoilt += 1
    if num_spoilt:
        logger.warning("%s: %d line(s) are cut off and were passed over", file.name, num_spoilt)
