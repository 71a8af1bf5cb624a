"""Latency of several runtimes in interleaved rounds, and throughput of all cores.

Other work on the machine slows all runtimes of a round alike. So runtimes take turns (A B C, B C A,
C A B ...), and what is compared is not their times but the ratio within each round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from tasks.contracts.conversion import VariantThroughput
from tasks.contracts.evaluation import Metric
from tasks.conversion.targets.interface import FloatArray, ModelInputs, Scorer

WARM_UP_CALLS = 3
LEAST_CALLS = 3
SLOW_CALL_MS = 200.0  # a slower call is a turn by itself
THROUGHPUT_ROUNDS = 7
ROUND_LENGTHS = 10  # of a latency turn: a round holds many calls of each caller
MILLION = 1e6
Calls = NDArray[np.float64]
"""Wall and processor time of each call of a turn, ms, shape (calls, 2)."""


@dataclass(frozen=True)
class Timing:
    """One runtime at one batch size."""

    calls_ms: NDArray[np.float64]
    rounds_ms: NDArray[np.float64]
    cpu_rounds_ms: NDArray[np.float64]
    """Processor time of a call, all threads of this process, mean of each turn."""

    @property
    def p50_ms(self) -> float:
        """Median of all calls."""
        return float(np.quantile(self.calls_ms, 0.5))

    @property
    def p95_ms(self) -> float:
        """95th percentile of all calls."""
        return float(np.quantile(self.calls_ms, 0.95))

    @property
    def cpu_ms(self) -> float:
        """Median of the turns' processor time of a call."""
        return float(np.median(self.cpu_rounds_ms))

    def times_faster_than(self, other: Timing) -> Metric:
        """How many times faster this runtime is than `other`, timed in the same rounds.

        Returns:
            Median over rounds of (other's time / this one's time), with its 95 % interval.
        """
        return median_interval(other.rounds_ms / self.rounds_ms)


def time_interleaved(
    runtimes: Mapping[str, Callable[[], object]], rounds: int, round_ms: float
) -> dict[str, Timing]:
    """Time calls of several runtimes in turns.

    Args:
        runtimes: name and a call without arguments.
        rounds: turns of each.
        round_ms: each turn repeats the call at least so long, in ms, and at least three times; a
            call of more than 200 ms is not repeated.

    Returns:
        For each name all calls' times and each turn's median time, turns in the same order for all.
    """
    names = list(runtimes)
    turns: dict[str, list[Calls]] = {name: [] for name in names}
    for call in runtimes.values():
        for _ in range(WARM_UP_CALLS):
            if _timed(call)[0] > SLOW_CALL_MS:
                break
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            turns[name].append(_one_turn(runtimes[name], round_ms))
    return {
        name: Timing(
            calls_ms=np.concatenate(of)[:, 0],
            rounds_ms=np.array([np.median(calls[:, 0]) for calls in of]),
            cpu_rounds_ms=np.array([calls[:, 1].mean() for calls in of]),
        )
        for name, of in turns.items()
    }


def _one_turn(call: Callable[[], object], round_ms: float) -> Calls:
    calls = [_timed(call)]  # it brings code and weights back into the caches
    if calls[0][0] > SLOW_CALL_MS:  # which does not matter to a long call
        return np.array(calls)
    del calls[0]
    start = time.perf_counter()
    while len(calls) < LEAST_CALLS or 1e3 * (time.perf_counter() - start) < round_ms:
        calls.append(_timed(call))
    return np.array(calls)


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    """Wall time and processor time of one call, ms."""
    cpu, start = time.process_time_ns(), time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e6, (time.process_time_ns() - cpu) / 1e6


def median_interval(values: FloatArray) -> Metric:
    """Median and its distribution-free 95 % interval, from the order statistics.

    The number of values below the true median is binomial(n, 1/2), so the k-th smallest and k-th
    largest value enclose it with probability 1 - 2 P(X < k) (Conover, Practical Nonparametric
    Statistics, section 3.2). With fewer than six values no k reaches 95 %: smallest and largest.
    """
    ordered, count = np.sort(values), len(values)
    rank = max(1, int(binom.ppf(0.025, count, 0.5)))
    median, low, high = np.median(ordered), ordered[rank - 1], ordered[count - rank]
    return Metric(value=float(median), low=float(low), high=float(high))


def measure_throughput(
    open_stream: Callable[[], Scorer], batch: ModelInputs, streams: int, round_ms: float
) -> VariantThroughput:
    """Let `streams` callers ask at the same time, each a copy of the variant of its own.

    Args:
        open_stream: loads a copy.
        batch: what every call asks.
        streams: callers.
        round_ms: length of a turn when latency is taken; a round here is ten times as long.
    """
    models = [open_stream() for _ in range(streams)]
    seconds = ROUND_LENGTHS * round_ms / 1e3
    rates, costs = [], []
    with ThreadPoolExecutor(streams) as pool:
        _round(pool, models, batch, seconds / ROUND_LENGTHS)  # warms up
        for _ in range(THROUGHPUT_ROUNDS):
            rate, cost = _round(pool, models, batch, seconds)
            rates.append(rate)
            costs.append(cost)
    return VariantThroughput(
        batch_rows=batch.num_rows,
        streams=streams,
        rows_per_s=median_interval(np.array(rates)),
        cpu_s_per_million=float(np.median(costs)) * MILLION,
    )


def _round(
    pool: ThreadPoolExecutor, models: Sequence[Scorer], batch: ModelInputs, seconds: float
) -> tuple[float, float]:
    """Rows a second of all callers together, and processor seconds a row."""
    together = threading.Barrier(len(models))

    def ask(model: Scorer) -> tuple[int, float]:
        together.wait()
        start, calls = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < seconds or not calls:
            model(batch)
            calls += 1
        return calls * batch.num_rows, passed

    cpu = time.process_time()
    answered = list(pool.map(ask, models))
    cpu = time.process_time() - cpu
    return sum(rows / passed for rows, passed in answered), cpu / sum(rows for rows, _ in answered)
