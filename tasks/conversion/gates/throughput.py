"""Rows a second when every core asks a variant at once, and the processor time that they cost."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tasks.contracts.measurement import VariantThroughput
from tasks.conversion.gates.latency import median_interval
from tasks.conversion.gates.parity import Scorer
from tasks.conversion.inputs import ModelInputs

ROUNDS = 7
ROUND_LENGTHS = 10  # of a latency turn: a round holds many calls of each caller
MILLION = 1e6


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: its affinity, or less where its control group says so."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


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
        for _ in range(ROUNDS):
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
