"""Spans of sampled calls, received by a real OTLP endpoint and read from a file."""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from serving.config import TraceConfig
from serving.errors import OverloadedError
from serving.observability.tracing import Tracing
from tests.support.services.listeners import Answer, Asked, http_listener
from tests.support.serving.builders import MODEL, TRACE, batch, call


@dataclass
class Collector:
    url: str
    received: list[Any]


@pytest.fixture
def collector() -> Iterator[Collector]:
    received: list[Any] = []

    def answer(asked: Asked) -> Answer:
        is_packed = asked.headers.get("content-encoding") == "gzip"
        request = ExportTraceServiceRequest.FromString(
            gzip.decompress(asked.body) if is_packed else asked.body
        )
        scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
        received.extend(span for scope in scopes for span in scope.spans)
        return 200, "application/x-protobuf", ExportTraceServiceResponse().SerializeToString()

    with http_listener(answer) as url:
        yield Collector(f"{url}/v1/traces", received)


@contextmanager
def traced(config: TraceConfig) -> Iterator[Tracing]:
    tracing = Tracing(config)
    tracing.start()
    yield tracing
    tracing.stop()


def test_a_callers_trace_goes_on_from_arrival_to_backend(collector: Collector) -> None:
    with traced(TraceConfig(endpoint=collector.url, ratio=0)) as tracing:
        asked = call(0.01, num_rows=3, trace=TRACE)
        asked.features = SimpleNamespace(began=asked.arrived, ended=asked.arrived + 0.004)
        tracing.served(batch(asked, call(0.01)))
    spans = {span.name: span for span in collector.received}
    assert set(spans) == {f"infer {MODEL}", "features", "queue", "compute"}
    own = spans[f"infer {MODEL}"]
    assert own.trace_id.hex() == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert own.parent_span_id.hex() == "00f067aa0ba902b7"
    assert all(span.trace_id == own.trace_id for span in collector.received)
    inner = [spans[name] for name in ("features", "queue", "compute")]
    assert all(span.parent_span_id == own.span_id for span in inner)
    assert own.start_time_unix_nano <= inner[0].start_time_unix_nano
    assert inner[0].end_time_unix_nano <= inner[1].start_time_unix_nano + 1000
    assert inner[1].end_time_unix_nano <= inner[2].start_time_unix_nano + 1000
    assert inner[2].end_time_unix_nano <= own.end_time_unix_nano + 1_000_000
    told = {a.key: a.value for a in own.attributes}
    assert told["falaj.version"].string_value == "3"
    assert told["falaj.rows"].int_value == 3
    assert {a.key: a.value.int_value for a in inner[2].attributes}["falaj.batch.calls"] == 2


def test_a_caller_that_does_not_sample_is_followed(collector: Collector) -> None:
    with traced(TraceConfig(endpoint=collector.url, ratio=1.0)) as tracing:
        tracing.served(batch(call(trace=TRACE[:-2] + "00")))
    assert not collector.received


@pytest.mark.parametrize("text", ["nonsense", TRACE.upper(), "ff" + TRACE[2:], "x" * 4000])
def test_what_is_no_traceparent_begins_a_trace(collector: Collector, text: str) -> None:
    with traced(TraceConfig(endpoint=collector.url, ratio=1.0)) as tracing:
        tracing.served(batch(call(trace=text)))
    assert len(collector.received) == 3


def test_a_refused_call_is_an_error_with_its_reason(collector: Collector) -> None:
    with traced(TraceConfig(endpoint=collector.url)) as tracing:
        tracing.refused(call(trace=TRACE), OverloadedError("entity 'N14228' waits"))
    (span,) = collector.received
    assert span.status.code == 2
    assert span.status.message == "overloaded"
    assert b"N14228" not in span.SerializeToString()


def test_the_ratio_decides_for_calls_without_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "traces" / "spans.jsonl"
    with traced(TraceConfig(file=file, ratio=0.25)) as tracing:
        for _ in range(600):
            tracing.served(batch(call()))
    spans = [json.loads(line) for line in file.read_text().splitlines()]
    assert 90 < len(spans) / 3 < 210
    assert {span["name"] for span in spans} == {f"infer {MODEL}", "queue", "compute"}
    assert len({span["context"]["trace_id"] for span in spans}) == len(spans) / 3


@pytest.mark.filterwarnings("ignore")
def test_a_collector_that_is_away_ends_nothing() -> None:
    with traced(TraceConfig(endpoint="http://127.0.0.1:9/v1/traces", ratio=1)) as tracing:
        tracing.served(batch(call()))
