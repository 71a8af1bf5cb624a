"""Everything that shows a serving process, in one object for its assembly.

shown = Observability(settings, config, states=engine.states, sources=[Source("log", log.counters)])
engine.add_observers(*shown.observers);  admin.pages |= shown.pages
await shown.start(); ...; await shown.stop()
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from serving.interfaces import Observer, Pages, VersionState
from serving.observability.config import ObservabilityConfig
from serving.observability.counting import Counting
from serving.observability.drift import DriftVerdicts
from serving.observability.metrics import Metrics, Source
from serving.observability.status import STEP_S, History, Status, status_page
from serving.observability.tracing import Tracing
from tasks.kernel.settings import Settings

logger = logging.getLogger(__name__)


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
        self._drift = DriftVerdicts(settings)
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
