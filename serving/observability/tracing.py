"""Traces from the gateway to the backend: a call's spans, sampled, sent by the SDK's own thread.

    infer <model>            from its arrival to its answer, continuing the caller's `traceparent`
      features               read from the online store, where the call named entities
      queue                  until its batch began
      compute                the model

Calls that are not sampled cost a look at their `traceparent`; one that is, some 60 microseconds.
"""

import random
import time
from contextlib import ExitStack

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import SpanKind, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import Status, StatusCode

from serving.config import TraceConfig
from serving.errors import ServingError
from serving.interfaces import Call, ServedBatch
from tasks.kernel.errors import ConfigurationError

_PROPAGATOR = TraceContextTextMapPropagator()
SERVICE = "falaj-serving"
MOST_WAITING = 4096
"""Spans that wait to be sent; more are dropped, which the SDK logs."""
EVERY_S, TIMEOUT_S = 2.0, 5.0
"""Between exports, and patience with the collector."""
Attributes = dict[str, str | int]


class Tracing:
    """An observer that makes spans of sampled calls; on the event loop's thread.

    Args:
        config: where to and of which calls.
    """

    def __init__(self, config: TraceConfig) -> None:
        self._config = config
        self._opened = ExitStack()
        self._tracer: Tracer | None = None

    def start(self) -> None:
        """Open the ways out; nothing where tracing is off.

        Raises:
            ConfigurationError: a collector is named and its library is not installed.
        """
        exporters: list[SpanExporter] = []
        if self._config.endpoint is not None:
            exporters.append(_collector(str(self._config.endpoint)))
        if self._config.file is not None:
            self._config.file.parent.mkdir(parents=True, exist_ok=True)
            lines = self._opened.enter_context(self._config.file.open("a", encoding="utf-8"))
            writer = ConsoleSpanExporter(
                out=lines, formatter=lambda s: f"{s.to_json(indent=None)}\n"
            )
            exporters.append(writer)
        if not exporters:
            return
        resource = Resource.create({"service.name": SERVICE})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        for exporter in exporters:
            sender = BatchSpanProcessor(exporter, MOST_WAITING, EVERY_S * 1e3)
            provider.add_span_processor(sender)
        self._opened.callback(provider.shutdown)  # before the file is closed
        self._tracer = provider.get_tracer(SERVICE)

    def stop(self) -> None:
        """Send what waits and end."""
        self._tracer = None
        self._opened.close()

    def served(self, batch: ServedBatch) -> None:
        """See `serving.interfaces.Observer`."""
        if self._tracer is not None:
            for call in batch.calls:
                if call.trace or self._config.ratio:
                    self._trace(self._tracer, call, batch, None)

    def refused(self, call: Call, error: ServingError) -> None:
        """See `serving.interfaces.Observer`."""
        if self._tracer is not None and (call.trace or self._config.ratio):
            self._trace(self._tracer, call, None, error)

    def _trace(
        self, tracer: Tracer, call: Call, batch: ServedBatch | None, error: ServingError | None
    ) -> None:
        """Make the spans of a call, where it is sampled."""
        context = self._sampled(call)
        if context is None:
            return
        now = time.monotonic()
        to_epoch_s = time.time() - now

        def moment(at: float) -> int:
            return int((at + to_epoch_s) * 1e9)

        name, known = f"infer {call.model}", _attributes(call, batch, error)
        begun = moment(call.arrived)
        own = tracer.start_span(name, context, SpanKind.SERVER, known, start_time=begun)
        inner = set_span_in_context(own, context)

        def child(name: str, begin: float, end: float, attributes: Attributes) -> None:
            span = tracer.start_span(name, inner, attributes=attributes, start_time=moment(begin))
            span.end(moment(max(begin, end)))

        read_at = getattr(call.features, "ended", 0.0)
        if read_at:
            child("features", call.features.began, read_at, {"falaj.rows": call.num_rows})
        if batch is not None:
            child("queue", max(read_at, call.arrived), batch.started, {})
            ran: Attributes = {
                "falaj.batch.rows": sum(one.num_rows for one in batch.calls),
                "falaj.batch.calls": len(batch.calls),
                "falaj.hardware": batch.served.hardware,
            }
            child("compute", batch.started, batch.finished, ran)
        if error is not None:
            own.set_status(Status(StatusCode.ERROR, error.reason))
        own.end(moment(now))

    def _sampled(self, call: Call) -> Context | None:
        """The caller's context, an empty one for a new trace; None where it is not sampled."""
        if call.trace:
            context = _PROPAGATOR.extract({"traceparent": call.trace}, Context())
            caller = get_current_span(context).get_span_context()
            if caller.is_valid:
                return context if caller.trace_flags.sampled else None
        return Context() if random.random() < self._config.ratio else None


def _collector(endpoint: str) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as exc:
        raise ConfigurationError(
            f"traces to {endpoint} need the extra `tracing`: pip install 'falaj[tracing]'"
        ) from exc
    return OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT_S)


def _attributes(call: Call, batch: ServedBatch | None, error: ServingError | None) -> Attributes:
    """Never features, answers or who asked."""
    found: Attributes = {
        "falaj.model": call.model,
        "falaj.slot": call.track,
        "falaj.request_id": call.request_id,
        "falaj.rows": call.num_rows,
    }
    if batch is not None:
        found |= {"falaj.version": batch.served.version, "falaj.variant": batch.served.variant}
        if batch.served.fell_over_from:
            found["falaj.fell_over_from"] = batch.served.fell_over_from
    if error is not None:
        found["error.type"] = error.reason
    return found
