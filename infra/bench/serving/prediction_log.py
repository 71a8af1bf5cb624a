"""What it costs to log a prediction, all in: the loop's part, columns, Parquet, compression, disk.

CPU time of the whole process from the first batch to the last written part, by request. The rows
are as wide as those of the flights: 60 columns, of numbers that nothing compresses.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from infra.bench.figures import Measured, at_most
from infra.bench.parts import Bench, plain_schema
from serving.interfaces import Call, Served, ServedBatch
from serving.log.prediction_log import PredictionLog
from tasks.contracts.conversion import tabular_signature
from tasks.predictions.config import PredictionLogConfig

MODEL = "bench"
CATEGORIES, NUMBERS = 7, 53
BURST_CALLS = 64


def figures(bench: Bench) -> Measured:
    """Cost of a logged request at concurrency 64 and 1, and what a burst loses unnoticed."""
    measured: Measured = []
    for calls, bound in ((64, 6.0), (1, 15.0)):
        loop_us, whole_us = cost_us(calls, bench.size(20_000, 1_000), bench.size(5, 1))
        evidence = f"of them {loop_us:.2f} us on the event loop; {CATEGORIES + NUMBERS} columns"
        name = f"CPU us of a logged request, {calls} at once"
        measured.append(at_most(name, whole_us, bound, evidence))
    num_rows = bench.size(1_000_000, 20_000)
    dropped, lost = burst(num_rows)
    rows = f"{num_rows:,} rows as fast as they can be offered, {dropped:,} dropped and counted"
    return [*measured, at_most("served rows neither logged nor counted", lost, 0, rows)]


def cost_us(calls: int, num_requests: int, rounds: int) -> tuple[float, float]:
    """CPU microseconds of a request with one row: of the calling thread, and of the process."""
    batches = [_batch(calls, number) for number in range(num_requests // calls)]
    taken = [_logged(batches) for _ in range(rounds + 1)][1:]  # the first one warms up
    requests = len(batches) * calls
    loop, whole = (statistics.median(seconds) for seconds in zip(*taken, strict=True))
    return 1e6 * loop / requests, 1e6 * whole / requests


def burst(num_rows: int) -> tuple[int, int]:
    """Rows that were dropped and counted, and rows that nothing tells of."""
    some = [_batch(BURST_CALLS, number) for number in range(50)]
    offered = 0
    with _opened() as log:
        while offered < num_rows:
            for batch in some:
                log.served(batch)
            offered += len(some) * BURST_CALLS
        log.stop(120)
        counters = log.counters()
    dropped = sum(counters["dropped_rows"].values())
    return dropped, offered - dropped - int(counters["logged_rows"])


def _logged(batches: Sequence[ServedBatch]) -> tuple[float, float]:
    with _opened() as log:
        whole, loop = time.process_time(), time.thread_time()
        for batch in batches:
            log.served(batch)
        loop = time.thread_time() - loop
        log.stop(60)
        return loop, time.process_time() - whole


@contextmanager
def _opened() -> Iterator[PredictionLog]:
    signature = tabular_signature(plain_schema(CATEGORIES, NUMBERS))
    with TemporaryDirectory() as home:
        log = PredictionLog(PredictionLogConfig(), Path(home), lambda model, version: signature)
        log.start()
        yield log


def _batch(calls: int, number: int) -> ServedBatch:
    draw, now = np.random.default_rng(number), time.monotonic()
    ids = [f"{number:x}-{n:x}-{draw.integers(1 << 62):x}" for n in range(calls)]
    inputs = {
        "categorical": draw.integers(0, 1 << 31, (calls, CATEGORIES)).astype(np.int32),
        "numeric": draw.normal(size=(calls, NUMBERS)).astype(np.float32),
    }
    outputs = {"score": draw.random(calls).astype(np.float32)}
    served = Served(MODEL, "1", "onnx-fp32", "stable", "cpu")
    made = tuple(Call(MODEL, {}, 1, each, subject="bench") for each in ids)
    return ServedBatch(made, inputs, outputs, served, now, now + 1e-4, time.time())
