"""Counts what a serving process answers and refuses; read by metrics and by the status page.

The event loop counts in plain integers: a look-up a batch, a bisection a call. Percentiles, rates
and text are worked out when somebody asks, from differences of these counters.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from serving.calls import Call, ServedBatch
from serving.errors import ServingError

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
    slot: str
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
    """Counters of one model version, variant, slot and hardware class."""

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
        refused_calls: by model, slot and reason; names that clients made up are all one.
        fell_over: batches by model, version, slot, the backend left and the hardware that answered.
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
        key = (by.model, by.version, by.variant, by.slot, by.hardware)
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
            fell = (by.model, by.version, by.slot, by.fell_over_from, by.hardware)
            self.fell_over[fell] = self.fell_over.get(fell, 0) + 1

    def refused(self, call: Call, error: ServingError) -> None:
        """See `serving.interfaces.Observer`."""
        key = (call.model, call.slot, error.reason)
        if key not in self.refused_calls and not self.knows_model(call.model):
            key = (UNKNOWN, call.slot, error.reason)
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
