"""Traces from the edge to the backend: a call's spans, sampled, sent by a thread.

    infer <model>            from its arrival to its answer, continuing the caller's `traceparent`
      features               read from the online store, where the call named entities
      queue                  until its batch began
      compute                the model

Calls that are not sampled cost a look at their `traceparent`; spans of the others are built by the
thread that sends them.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import Status, StatusCode

from serving.errors import ServingError
from serving.interfaces import Call, Served, ServedBatch
from serving.observability.config import TraceConfig
from tasks.kernel.errors import ConfigurationError

logger = logging.getLogger(__name__)
_PROPAGATOR = TraceContextTextMapPropagator()
SERVICE = "falaj-serving"
MOST_WAITING = 4096
"""Calls whose spans wait to be sent; more are dropped and counted."""
EVERY_S, TIMEOUT_S = 2.0, 5.0
"""Between exports, and patience with the collector."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A sampled call and what came of it; times on `time.monotonic()`."""

    call: Call
    parent: SpanContext | None
    ended: float
    to_epoch_s: float
    """Added to a monotonic time gives seconds since 1970."""
    served: Served | None = None
    started: float = 0.0
    finished: float = 0.0
    batch_rows: int = 0
    batch_calls: int = 0
    refused: ServingError | None = None


def read_traceparent(text: str) -> SpanContext | None:
    """The caller's span of a W3C `traceparent`, None where it is none."""
    found = get_current_span(_PROPAGATOR.extract({"traceparent": text})).get_span_context()
    return found if found.is_valid else None


class Tracing:
    """An observer that keeps sampled calls until its thread sends their spans.

    Args:
        config: where to and of which calls.
    """

    def __init__(self, config: TraceConfig) -> None:
        self._config = config
        self._waiting: deque[Seen] = deque()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._exporters: list[SpanExporter] = []
        self._resource = Resource.create({"service.name": SERVICE})
        self.num_sampled = self.num_dropped = self.num_sent = self.num_failed = 0

    def start(self) -> None:
        """Open the ways out and start the thread; nothing where tracing is off."""
        if not self._config.is_on:
            return
        self._exporters = list(_exporters(self._config))
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send what waits and end."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        for exporter in self._exporters:
            exporter.shutdown()

    def served(self, batch: ServedBatch) -> None:
        """See `serving.interfaces.Observer`."""
        if self._thread is None:
            return
        for call in batch.calls:
            if (call.trace or self._config.ratio) and (sampled := self._sampled(call)) is not None:
                self._keep(
                    Seen(
                        call=call,
                        parent=sampled[0],
                        ended=time.monotonic(),
                        to_epoch_s=batch.finished_at - batch.finished,
                        served=batch.served,
                        started=batch.started,
                        finished=batch.finished,
                        batch_rows=sum(c.num_rows for c in batch.calls),
                        batch_calls=len(batch.calls),
                    )
                )

    def refused(self, call: Call, error: ServingError) -> None:
        """See `serving.interfaces.Observer`."""
        if self._thread is None or not (call.trace or self._config.ratio):
            return
        if (sampled := self._sampled(call)) is not None:
            now = time.monotonic()
            self._keep(Seen(call, sampled[0], now, time.time() - now, refused=error))

    def counters(self) -> dict[str, int]:
        """What became of sampled calls and of their spans; for metrics."""
        return {
            "sampled": self.num_sampled,
            "dropped": self.num_dropped,
            "sent_spans": self.num_sent,
            "failed_spans": self.num_failed,
            "waiting": len(self._waiting),
        }

    def _sampled(self, call: Call) -> tuple[SpanContext | None] | None:
        """The caller's span (None for a new trace) in a tuple; None where it is not sampled."""
        parent = read_traceparent(call.trace) if call.trace else None
        if parent is not None:
            return (parent,) if parent.trace_flags.sampled else None
        return (None,) if random.random() < self._config.ratio else None

    def _keep(self, seen: Seen) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self.num_dropped += 1
            return
        self.num_sampled += 1
        self._waiting.append(seen)

    def _work(self) -> None:
        while not self._stop.wait(EVERY_S):
            self._send()
        self._send()

    def _send(self) -> None:
        """Everything that waits, in one export."""
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        spans = [span for seen in taken for span in spans_of(seen, self._resource)]
        if not spans:
            return
        for exporter in self._exporters:
            try:
                sent = exporter.export(spans) is SpanExportResult.SUCCESS
            except Exception as exc:  # whatever a collector does must not end the thread
                logger.warning("%d spans were not sent: %s", len(spans), exc)
                sent = False
            if sent:
                self.num_sent += len(spans)
            else:
                self.num_failed += len(spans)


class LineExporter(SpanExporter):
    """Appends spans to a file, one JSON object a line."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """One append for all."""
        text = "".join(f"{span.to_json(indent=None)}\n" for span in spans)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(text)
        return SpanExportResult.SUCCESS


def _exporters(config: TraceConfig) -> Iterator[SpanExporter]:
    if config.endpoint is not None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as exc:
            raise ConfigurationError(
                f"traces to {config.endpoint} need the extra `tracing`: pip install falaj[tracing]"
            ) from exc
        yield OTLPSpanExporter(endpoint=str(config.endpoint), timeout=TIMEOUT_S)
    if config.file is not None:
        yield LineExporter(config.file)


def spans_of(seen: Seen, resource: Resource) -> list[ReadableSpan]:
    """The spans of one call, its own first."""
    call, caller = seen.call, seen.parent
    trace_id = caller.trace_id if caller else random.getrandbits(128) or 1
    own = _context(trace_id)
    status = Status(StatusCode.ERROR, seen.refused.reason) if seen.refused else Status()

    def span(
        name: str,
        context: SpanContext,
        above: SpanContext | None,
        begin: float,
        end: float,
        attributes: dict[str, str | int | float],
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> ReadableSpan:
        return ReadableSpan(
            name=name,
            context=context,
            parent=above,
            resource=resource,
            attributes=attributes,
            kind=kind,
            status=status if above is caller else Status(),
            start_time=_nanoseconds(begin + seen.to_epoch_s),
            end_time=_nanoseconds(max(end, begin) + seen.to_epoch_s),
        )

    name = f"infer {call.model}"
    spans = [span(name, own, caller, call.arrived, seen.ended, _attributes(seen), SpanKind.SERVER)]
    began = getattr(call.features, "began", 0.0)
    until = getattr(call.features, "ended", 0.0)
    if until:
        rows: dict[str, str | int | float] = {"falaj.rows": call.num_rows}
        spans.append(span("features", _context(trace_id), own, began, until, rows))
    if seen.served is not None:
        waited = max(until, call.arrived)
        spans.append(span("queue", _context(trace_id), own, waited, seen.started, {}))
        ran: dict[str, str | int | float] = {
            "falaj.batch.rows": seen.batch_rows,
            "falaj.batch.calls": seen.batch_calls,
            "falaj.hardware": seen.served.hardware,
        }
        spans.append(span("compute", _context(trace_id), own, seen.started, seen.finished, ran))
    return spans


def _attributes(seen: Seen) -> dict[str, str | int | float]:
    """Never features, answers or who asked."""
    call = seen.call
    told: dict[str, str | int | float] = {
        "falaj.model": call.model,
        "falaj.slot": call.track,
        "falaj.request_id": call.request_id,
        "falaj.rows": call.num_rows,
    }
    if seen.served is not None:
        told |= {"falaj.version": seen.served.version, "falaj.variant": seen.served.variant}
        if seen.served.fell_over_from:
            told["falaj.fell_over_from"] = seen.served.fell_over_from
    if seen.refused is not None:
        told["error.type"] = seen.refused.reason
    return told


def _context(trace_id: int) -> SpanContext:
    span_id = random.getrandbits(64) or 1
    return SpanContext(trace_id, span_id, False, TraceFlags(TraceFlags.SAMPLED))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
