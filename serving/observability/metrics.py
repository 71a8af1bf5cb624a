"""What a serving process answers and refuses, counted, and Prometheus' text of it.

The event loop counts in plain integers: a look-up a batch, a bisection a call. Percentiles, rates
and text are worked out when somebody asks, from differences of these counters.
"""

import time
from bisect import bisect_left
from collections import Counter
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
EVERY_BOUND = 4
"""So many classes become one of Prometheus': 16 bounds, each twice the one before."""
UNKNOWN = "(unknown)"
"""Stands for every name that is no model's: what clients make up must not become series."""
SERVED = ("model", "version", "variant", "slot", "hardware")
"""Labels of a series."""
Labels = tuple[str, ...]


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


@dataclass(slots=True)
class Series:
    """Counters of one model version, variant, track and hardware class.

    Attributes:
        latency: of each call, from its arrival to its answer.
        compute: of each batch, of the model alone.
        queued: of each batch, how long its oldest call had waited.
    """

    rows: int = 0
    batches: int = 0
    latency: Times = field(default_factory=Times)
    compute: Times = field(default_factory=Times)
    queued: Times = field(default_factory=Times)


@dataclass
class Counting:
    """An observer that counts. On the event loop's thread alone.

    Attributes:
        knows_model: whether a name that a client sent is that of a model here.
        series: by what answered, as `SERVED` names it.
        refused_calls: by model, track and reason; names that clients made up are all one.
        fell_over: batches by model, version, track, hardware that failed, and that answered.
    """

    knows_model: Callable[[str], bool]
    series: dict[Labels, Series] = field(default_factory=dict)
    refused_calls: Counter[Labels] = field(default_factory=Counter)
    fell_over: Counter[Labels] = field(default_factory=Counter)
    started_at: float = field(default_factory=time.time)

    def served(self, batch: ServedBatch) -> None:
        """See `serving.interfaces.Observer`."""
        now = time.monotonic()
        by = batch.served
        key = (by.model, by.version, by.variant, by.track, by.hardware)
        series = self.series.get(key)
        if series is None:
            series = self.series[key] = Series()
        counts, total, rows = series.latency.counts, 0.0, 0
        oldest = batch.started
        for call in batch.calls:
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
            self.fell_over[by.model, by.version, by.track, by.fell_over_from, by.hardware] += 1

    def refused(self, call: Call, error: ServingError) -> None:
        """See `serving.interfaces.Observer`."""
        key = (call.model, call.track, error.reason)
        if key not in self.refused_calls and not self.knows_model(call.model):
            key = (UNKNOWN, call.track, error.reason)
        self.refused_calls[key] += 1


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


@dataclass(frozen=True)
class Source:
    """Counters of another component of the process: engine, log, entity reader.

    Attributes:
        name: stands in the metrics' names: `falaj_<name>_<counter>_total`.
        read: numbers by name, or by name and label values: `{"waiting": 3}`,
            `{"refused": {"overloaded": 7}}`, `{"freshness": {("weather", "stale"): 1}}`.
        gauges: names among them that may fall.
        labels: name to the names of its labels; `kind` where nothing is said.
    """

    name: str
    read: Callable[[], Mapping[str, Any]]
    gauges: frozenset[str] = frozenset()
    labels: Mapping[str, Labels] = field(default_factory=dict)

    def families(self) -> Iterator[Metric]:
        """The counters as Prometheus' metric families."""
        for name, value in self.read().items():
            by_labels = isinstance(value, Mapping)
            labels = self.labels.get(name, ("kind",)) if by_labels else ()
            kind = GaugeMetricFamily if name in self.gauges else CounterMetricFamily
            text = f"{name.replace('_', ' ')} of {self.name}."
            family = kind(f"falaj_{self.name}_{name}", text, labels=labels)
            for key, number in value.items() if by_labels else [((), value)]:
                family.add_metric([key] if isinstance(key, str) else key, number)
            yield family


class Metrics(Collector):
    """The page `/metrics`: everything that is known of one serving process.

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
        self._counting, self._states, self._sources = counting, states, tuple(sources)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def page(self) -> tuple[str, bytes]:
        """Content type and text."""
        return CONTENT_TYPE_LATEST, generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All families, of one moment."""
        series = list(self._counting.series.items())
        requests = {key: sum(one.latency.counts) for key, one in series}
        rows, batches = ({key: getattr(s, n) for key, s in series} for n in ("rows", "batches"))
        refused, fell_over = self._counting.refused_calls, self._counting.fell_over
        of_refusal = ("model", "slot", "reason")
        of_fall_over = ("model", "version", "slot", "from", "hardware")
        yield from (
            _counted("answered_requests", "Requests that were answered.", SERVED, requests),
            _counted("answered_rows", "Rows of these requests.", SERVED, rows),
            _counted("batches", "Batches that a model ran on.", SERVED, batches),
            _timed("request", "From a request's arrival to its answer.", series, "latency"),
            _timed("compute", "Time of the model, a batch.", series, "compute"),
            _timed("queue", "Wait of a batch's oldest request.", series, "queued"),
            _counted("refused_requests", "Requests that were not answered.", of_refusal, refused),
            _counted("fell_over_batches", "Answered by other hardware.", of_fall_over, fell_over),
        )
        labels = ("model", "version", "state", "slots", "variant", "hardware")
        versions = GaugeMetricFamily(
            "falaj_model_version", "Versions in this process; the value is always 1.", labels=labels
        )
        for s in self._states():
            tracks = ",".join(s.tracks)
            versions.add_metric((s.name, s.version, s.state, tracks, s.variant, s.hardware), 1)
        yield versions
        for source in self._sources:
            yield from source.families()


def _counted(name: str, text: str, labels: Labels, numbers: Mapping[Labels, int]) -> Metric:
    family = CounterMetricFamily(f"falaj_{name}", text, labels=labels)
    for key, number in numbers.items():
        family.add_metric(key, number)
    return family


def _timed(name: str, text: str, series: list[tuple[Labels, Series]], times: str) -> Metric:
    family = HistogramMetricFamily(f"falaj_{name}_seconds", text, labels=SERVED)
    for key, one in series:
        counted: Times = getattr(one, times)
        buckets, total = [], 0
        for position, count in enumerate(counted.counts[:-1]):
            total += count
            if position % EVERY_BOUND == EVERY_BOUND - 1:
                buckets.append((repr(BOUNDS_S[position]), float(total)))
        buckets.append(("+Inf", float(total + counted.counts[-1])))
        family.add_metric(key, buckets, counted.sum_s)
    return family
