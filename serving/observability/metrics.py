"""Prometheus' text, rendered from the counters when it is asked for.

Counts what a serving process answers and refuses; read by metrics and by the status page.

The event loop counts in plain integers: a look-up a batch, a bisection a call. Percentiles, rates
and text are worked out when somebody asks, from differences of these counters.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from serving.errors import ServingError
from serving.interfaces import Call, ServedBatch, VersionState

FIRST_BOUND_S, RATIO, NUM_BOUNDS = 1e-4, 1.2, 64
BOUNDS_S = tuple(float(f"{FIRST_BOUND_S * RATIO**n:.3g}") for n in range(NUM_BOUNDS))
"""Upper bounds of the classes in which times are counted: 0.1 ms to 9.7 s, each a fifth wider."""

UNKNOWN = "(unknown)"
"""Stands for every name that is no model's: what clients make up must not become series."""


@dataclass(frozen=True, slots=True)
class ServedKey:
    """What one series is of."""

    model: str
    version: str
    variant: str
    track: str
    hardware: str


class Times:
    """How often a time fell into each class, and their sum; the last class is above all bounds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (NUM_BOUNDS + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


class Series:
    """Counters of one model version, variant, track and hardware class."""

    __slots__ = ("batches", "compute", "key", "latency", "queued", "rows")

    def __init__(self, key: ServedKey) -> None:
        self.key = key
        self.rows = self.batches = 0
        self.latency = Times()
        """Of each call, from its arrival to its answer."""
        self.compute = Times()
        """Of each batch, of the model alone."""
        self.queued = Times()
        """Of each batch, how long its oldest call had waited."""

    @property
    def requests(self) -> int:
        """Calls that were answered."""
        return sum(self.latency.counts)


@dataclass
class Counting:
    """An observer that counts. On the event loop's thread alone.

    Attributes:
        knows_model: whether a name that a client sent is that of a model here.
        series: by what answered.
        refused_calls: by model, track and reason; names that clients made up are all one.
        fell_over: batches by model, version, track, backend left and hardware that answered.
    """

    knows_model: Callable[[str], bool]
    series: dict[tuple[str, ...], Series] = field(default_factory=dict)
    refused_calls: dict[tuple[str, ...], int] = field(default_factory=dict)
    fell_over: dict[tuple[str, ...], int] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)

    def served(self, batch: ServedBatch) -> None:
        """See `serving.interfaces.Observer`."""
        now = time.monotonic()
        by = batch.served
        key = (by.model, by.version, by.variant, by.track, by.hardware)
        series = self.series.get(key)
        if series is None:
            series = self.series[key] = Series(ServedKey(*key))
        calls = batch.calls
        counts, total, rows = series.latency.counts, 0.0, 0
        oldest = batch.started
        for call in calls:
            arrived = call.arrived
            seconds = now - arrived
            counts[bisect_left(BOUNDS_S, seconds)] += 1
            total += seconds
            rows += call.num_rows
            if arrived < oldest:
                oldest = arrived
        series.latency.sum_s += total
        series.rows += rows
        series.batches += 1
        series.compute.add(batch.finished - batch.started)
        series.queued.add(batch.started - oldest)
        if by.fell_over_from:
            fell = (by.model, by.version, by.track, by.fell_over_from, by.hardware)
            self.fell_over[fell] = self.fell_over.get(fell, 0) + 1

    def refused(self, call: Call, error: ServingError) -> None:
        """See `serving.interfaces.Observer`."""
        key = (call.model, call.track, error.reason)
        if key not in self.refused_calls and not self.knows_model(call.model):
            key = (UNKNOWN, call.track, error.reason)
        self.refused_calls[key] = self.refused_calls.get(key, 0) + 1


def percentile_s(counts: list[int], share: float) -> float | None:
    """The time that a share of all counted ones did not exceed; None where none was counted.

    Exact to the width of a class, a fifth: within one, times are taken to lie evenly.
    """
    total = sum(counts)
    if not total:
        return None
    wanted, below = share * total, 0
    for position, count in enumerate(counts):
        if count and below + count >= wanted:
            low = BOUNDS_S[position - 1] if position else 0.0
            high = BOUNDS_S[min(position, NUM_BOUNDS - 1)]
            return low + (high - low) * max(wanted - below, 0.0) / count if high > low else high
        below += count
    return BOUNDS_S[-1]


EVERY_BOUND = 4
"""So many classes become one of Prometheus': 16 bounds, each twice the one before."""
SERVED = ("model", "version", "variant", "slot", "hardware")
_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]+")
Numbers = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Source:
    """Counters of another part of the process: engine, log, guard, entity reader.

    Attributes:
        name: stands in the metrics' names: `falaj_<name>_<counter>_total`.
        read: numbers by name, or by name and label values: `{"dropped": 3}`,
            `{"refused": {"overloaded": 7}}`, `{"freshness": {"weather": {"stale": 1}}}`,
            `{"spilled": {("m", "stable", "3"): 1}}`.
        gauges: names among them that may fall.
        labels: name to the names of its labels; without them they are `kind`, or `kind` and `of`.
    """

    name: str
    read: Numbers
    gauges: frozenset[str] = frozenset()
    labels: Mapping[str, tuple[str, ...]] | None = None


class ServingCollector(Collector):
    """Everything that is known of one serving process, as Prometheus' metric families."""

    def __init__(
        self,
        counting: Counting,
        states: Callable[[], Sequence[VersionState]],
        sources: Iterable[Source],
    ) -> None:
        self._counting, self._states, self._sources = counting, states, tuple(sources)

    def collect(self) -> Iterator[Metric]:
        """All families, of one moment."""
        series = list(self._counting.series.values())
        yield from _served(series)
        yield _counted(
            "falaj_refused_requests",
            "Requests that were not answered, by reason.",
            ("model", "slot", "reason"),
            self._counting.refused_calls,
        )
        yield _counted(
            "falaj_fell_over_batches",
            "Batches that another backend answered than the first one.",
            ("model", "version", "slot", "from", "hardware"),
            self._counting.fell_over,
        )
        yield self._ready()
        for source in self._sources:
            yield from _of_source(source)

    def describe(self) -> Iterator[Metric]:
        """Nothing beforehand: sources are not asked before somebody wants to know."""
        return iter(())

    def _ready(self) -> Metric:
        labels = ("model", "version", "state", "slots", "variant", "hardware")
        family = GaugeMetricFamily(
            "falaj_model_version", "Versions in this process; the value is always 1.", labels=labels
        )
        for s in self._states():
            told = (s.name, s.version, s.state, ",".join(s.tracks), s.variant, s.hardware)
            family.add_metric(told, 1)
        return family


class Metrics:
    """The page `/metrics`.

    Args:
        counting: what was answered and refused.
        states: versions of the process.
        sources: further counters.
    """

    def __init__(
        self,
        counting: Counting,
        states: Callable[[], Sequence[VersionState]],
        sources: Iterable[Source] = (),
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(ServingCollector(counting, states, sources))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def page(self) -> tuple[str, bytes]:
        """Content type and text."""
        return CONTENT_TYPE_LATEST, generate_latest(self._registry)


def _served(series: list[Series]) -> Iterator[Metric]:
    simple: tuple[tuple[str, str, Callable[[Series], int]], ...] = (
        ("falaj_answered_requests", "Requests that were answered.", lambda s: s.requests),
        ("falaj_answered_rows", "Rows of these requests.", lambda s: s.rows),
        ("falaj_batches", "Batches that a model ran on.", lambda s: s.batches),
    )
    for name, text, number in simple:
        family = CounterMetricFamily(name, text, labels=SERVED)
        for s in series:
            family.add_metric(_labels(s), number(s))
        yield family
    timed: tuple[tuple[str, str, Callable[[Series], Times]], ...] = (
        ("falaj_request_seconds", "From a request's arrival to its answer.", lambda s: s.latency),
        ("falaj_compute_seconds", "Time of the model, a batch.", lambda s: s.compute),
        ("falaj_queue_seconds", "Wait of a batch's oldest request.", lambda s: s.queued),
    )
    for name, text, times in timed:
        histogram = HistogramMetricFamily(name, text, labels=SERVED)
        for s in series:
            counted = times(s)
            histogram.add_metric(_labels(s), _cumulative(counted.counts), counted.sum_s)
        yield histogram


def _labels(series: Series) -> list[str]:
    key = series.key
    return [key.model, key.version, key.variant, key.track, key.hardware]


def _cumulative(counts: list[int]) -> list[tuple[str, float]]:
    found, total = [], 0
    for position, count in enumerate(counts[:-1]):
        total += count
        if position % EVERY_BOUND == EVERY_BOUND - 1:
            found.append((repr(BOUNDS_S[position]), float(total)))
    return [*found, ("+Inf", float(total + counts[-1]))]


def _counted(
    name: str, text: str, labels: tuple[str, ...], numbers: Mapping[tuple[str, ...], int]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, number in numbers.items():
        family.add_metric(key, number)
    return family


def _of_source(source: Source) -> Iterator[Metric]:
    for name, value in source.read().items():
        if not isinstance(value, int | float | Mapping):
            continue
        flat = dict(_flattened(value))
        depth = max((len(key) for key in flat), default=0)
        labels = (source.labels or {}).get(name, ("kind", "of")[:depth])
        full = f"falaj_{_NOT_IN_A_NAME.sub('_', source.name)}_{_NOT_IN_A_NAME.sub('_', name)}"
        kind = GaugeMetricFamily if name in source.gauges else CounterMetricFamily
        family = kind(full, f"{name.replace('_', ' ')} of {source.name}.", labels=labels)
        for key, number in flat.items():
            if len(key) == len(labels):
                family.add_metric(key, number)
        yield family


def _flattened(value: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            below = name if isinstance(name, tuple) else (str(name),)
            yield from _flattened(inner, (*key, *below))
    elif isinstance(value, int | float):
        yield key, float(value)
