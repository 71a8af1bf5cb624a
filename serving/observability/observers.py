"""Everything that shows a serving process, in one object for its assembly."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from serving.interfaces import Observer, Pages, VersionState
from serving.observability.config import ObservabilityConfig
from serving.observability.metrics import Counting, Metrics, Source
from serving.observability.status import STEP_S, Status, status_page
from serving.observability.tracing import Tracing

logger = logging.getLogger(__name__)


class Observability:
    """Counters, metrics, traces and status page of one process.

    Args:
        config: what goes where.
        states: versions of the process, as `Engine.states` reports them.
        sources: counters of further components: engine, log, entity reader.
    """

    def __init__(
        self,
        config: ObservabilityConfig,
        *,
        states: Callable[[], Sequence[VersionState]],
        sources: Iterable[Source] = (),
    ) -> None:
        sources = tuple(sources)
        self.counting = Counting(lambda model: any(state.name == model for state in states()))
        self.status = Status(self.counting, states, sources)
        self._tracing = Tracing(config.traces)
        self._metrics = Metrics(self.counting, states, sources)
        self._task: asyncio.Task[None] | None = None

    @property
    def observers(self) -> tuple[Observer, ...]:
        """All that want to know what is served."""
        return self.counting, self._tracing

    @property
    def pages(self) -> Pages:
        """For the admin listener."""
        return {
            "/metrics": self._metrics.page,
            "/status": self._page,
            "/status.json": self._json,
        }

    async def start(self) -> None:
        """Start keeping points of the status and sending spans."""
        self._tracing.start()
        self._task = asyncio.create_task(self._keep(), name="observability")

    async def stop(self) -> None:
        """Send the spans that wait, and end."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await asyncio.to_thread(self._tracing.stop)

    def _page(self) -> tuple[str, bytes]:
        return "text/html; charset=utf-8", status_page(self.status.read()).encode()

    def _json(self) -> tuple[str, bytes]:
        return "application/json", json.dumps(self.status.read(), allow_nan=False).encode()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            try:
                self.status.note()
            except Exception:  # showing a process must never be what ends it
                logger.exception("the status was not noted")
