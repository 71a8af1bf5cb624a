"""Everything that shows a serving process, in one object for its assembly.

shown = Observability(settings, config, states=engine.states, sources=[Source("log", log.counters)])
engine.add_observers(*shown.observers);  admin.pages |= shown.pages
await shown.start(); ...; await shown.stop()

The newest drift result on each served model, from the controller's record.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from serving.interfaces import Observer, Pages, VersionState
from serving.observability.config import ObservabilityConfig
from serving.observability.metrics import Counting, Metrics, Source
from serving.observability.status import STEP_S, History, Status, status_page
from serving.observability.tracing import Tracing
from tasks.contracts.drift import DriftResult
from tasks.control.retraining.ledger import Ledger
from tasks.control.retraining.records import StoredResult
from tasks.kernel.errors import FalajError
from tasks.kernel.settings import Settings

logger = logging.getLogger(__name__)
FINE = (DriftResult.STABLE,)
TROUBLE = (DriftResult.RETRAIN, DriftResult.DATA_FAULT)


class DriftResults:
    """Results as they were found at the last look; looking is for a thread.

    Args:
        settings: where the database of operation and the use case are.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ledger: Ledger | None = None
        self._found: dict[str, Mapping[str, Any] | None] = {}

    def of(self, model: str) -> Mapping[str, Any] | None:
        """The newest drift result on a model, None before the first."""
        return self._found.get(model)

    def look(self, models: Iterable[str]) -> None:
        """Read the newest drift results; what was found before stays where the database is away."""
        try:
            ledger = self._opened()
            if ledger is None:
                return
            for model in models:
                stored = ledger.newest_result(model, self._settings.use_case)
                self._found[model] = None if stored is None else _report_of(stored)
        except FalajError as exc:
            logger.warning("the newest drift results were not read: %s", exc)

    def _opened(self) -> Ledger | None:
        """The record; None where there is none yet, which looking must not make."""
        if self._ledger is None:
            is_file = self._settings.database_url is None
            if is_file and not self._settings.metadata_file.exists():
                return None
            self._ledger = Ledger(self._settings.metadata_url)
        return self._ledger


def _report_of(stored: StoredResult) -> dict[str, Any]:
    evidence = stored.evidence
    return {
        "verdict": evidence.result.value,
        "is_fine": evidence.result in FINE,
        "is_trouble": evidence.result in TROUBLE,
        "version": str(evidence.version),
        "window": {
            "start": evidence.window.start.isoformat(),
            "end": evidence.window.end.isoformat(),
        },
        "stored_at": stored.stored_at.isoformat(timespec="seconds"),
        "num_features": evidence.num_features,
        "num_drifted": evidence.num_drifted,
        "drifted": list(evidence.drifted),
        "sentences": list(evidence.sentences),
    }


DRIFT_EVERY_S = 30.0
"""Between two looks at the newest drift results."""


class Observability:
    """Counters, metrics, traces, access log and status page of one process.

    Args:
        settings: where the retraining controller's record of drift is.
        config: what goes where.
        states: versions of the process, as `Engine.states` reports them.
        sources: counters of further parts: engine, log, guard, entity reader.
    """

    def __init__(
        self,
        settings: Settings,
        config: ObservabilityConfig,
        *,
        states: Callable[[], Sequence[VersionState]],
        sources: Iterable[Source] = (),
    ) -> None:
        self.config = config
        self.counting = Counting(lambda model: any(state.name == model for state in states()))
        self.tracing = Tracing(self.config.traces)
        counted = [*sources, Source("traces", self.tracing.counters, frozenset({"waiting"}))]
        self._drift = DriftResults(settings)
        self._history = History(self.counting, counted)
        self._states = states
        self._metrics = Metrics(self.counting, states, counted)
        self._status = Status(self.counting, self._history, states, self._drift.of)
        self._task: asyncio.Task[None] | None = None

    @property
    def observers(self) -> tuple[Observer, ...]:
        """All that want to know what is served, off ones left out."""
        found: list[Observer] = [self.counting]
        if self.config.traces.is_on:
            found.append(self.tracing)
        return tuple(found)

    @property
    def pages(self) -> Pages:
        """For the admin listener."""
        return {
            "/metrics": self._metrics.page,
            "/status": self._page,
            "/status.json": self._json,
        }

    async def start(self) -> None:
        """Start keeping history and sending spans."""
        self.tracing.start()
        self._task = asyncio.create_task(self._keep(), name="observability")

    async def stop(self) -> None:
        """Send the spans that wait, and end."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await asyncio.to_thread(self.tracing.stop)

    def _page(self) -> tuple[str, bytes]:
        return "text/html; charset=utf-8", status_page(self._status.read()).encode()

    def _json(self) -> tuple[str, bytes]:
        return "application/json", json.dumps(self._status.read(), allow_nan=False).encode()

    async def _keep(self) -> None:
        looked = float("-inf")
        while True:
            try:
                self._history.note()
                if time.monotonic() - looked >= DRIFT_EVERY_S:
                    models = {state.name for state in self._states()}
                    await asyncio.to_thread(self._drift.look, models)
                    looked = time.monotonic()
            except Exception:  # showing a process must never be what ends it
                logger.exception("the status was not noted")
            await asyncio.sleep(STEP_S)
