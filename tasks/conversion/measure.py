"""Latency of several runtimes in interleaved rounds, throughput of all cores, and memory.

Other work on the machine slows all runtimes of a round alike. So runtimes take turns (A B C, B C A,
C A B ...), and what is compared is not their times but the ratio within each round.

Memory and load time are measured in a process that nothing else disturbs: `python -m` this module.
The second of two copies is measured: the first one brings the runtime's libraries in, and they are
no part of the model. Memory that earlier copies gave back is returned to the system in between.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.contracts.conversion import VariantThroughput
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import BuiltVariant, RegisteredProgram
from tasks.conversion.targets.interface import FloatArray, ModelInputs, Runtime, Scorer
from tasks.conversion.variants import load_variant
from tasks.kernel.errors import refused_writes_explained
from tasks.kernel.scratch import scratch_folder
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore

WARM_UP_CALLS = 3
LEAST_CALLS = 3
SLOW_CALL_MS = 200.0  # a slower call is a turn by itself
THROUGHPUT_ROUNDS = 7
ROUND_LENGTHS = 10  # of a latency turn: a round holds many calls of each caller
MILLION = 1e6


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

    def cpu_ratio_to(self, other: Timing) -> float:
        """Processor time as a part of `other`'s: median of the ratios within each round."""
        return float(np.median(self.cpu_rounds_ms / other.cpu_rounds_ms))


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
    turns: dict[str, list[_Turn]] = {name: [] for name in names}
    for name in names:
        _warm_up(runtimes[name])
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            turns[name].append(_one_turn(runtimes[name], round_ms))
    return {
        name: Timing(
            calls_ms=np.concatenate([turn.calls_ms for turn in parts]),
            rounds_ms=np.array([np.median(turn.calls_ms) for turn in parts]),
            cpu_rounds_ms=np.array([turn.cpu_ms for turn in parts]),
        )
        for name, parts in turns.items()
    }


@dataclass(frozen=True)
class _Turn:
    calls_ms: NDArray[np.float64]
    cpu_ms: float


def _warm_up(call: Callable[[], object]) -> None:
    for _ in range(WARM_UP_CALLS):
        if _timed(call)[0] > SLOW_CALL_MS:
            return


def _one_turn(call: Callable[[], object], round_ms: float) -> _Turn:
    wall_ms, cpu_ms = _timed(call)  # it brings code and weights back into the caches
    if wall_ms > SLOW_CALL_MS:  # which does not matter to a long call
        return _Turn(np.array([wall_ms]), cpu_ms)
    walls: list[float] = []
    total = cpu = 0.0
    while total < round_ms or len(walls) < LEAST_CALLS:
        wall_ms, cpu_ms = _timed(call)
        walls.append(wall_ms)
        total, cpu = total + wall_ms, cpu + cpu_ms
    return _Turn(np.array(walls), cpu / len(walls))


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    """Wall time and processor time of one call, ms."""
    cpu, start = time.process_time_ns(), time.perf_counter_ns()
    call()
    end = time.perf_counter_ns()
    return (end - start) / 1e6, (time.process_time_ns() - cpu) / 1e6


def median_interval(values: FloatArray) -> Metric:
    """Median and its distribution-free 95 % interval, from the order statistics.

    The number of values below the true median is binomial(n, 1/2), so the k-th smallest and k-th
    largest value enclose it with probability 1 - 2 P(X < k) (Conover, Practical Nonparametric
    Statistics, section 3.2). With fewer than six values no k reaches 95 %: smallest and largest.
    """
    ordered = np.sort(values)
    count = len(ordered)
    rank, below = 0, 0.0
    while (below := below + math.comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    rank = max(rank, 1)
    return Metric(
        value=float(np.median(ordered)),
        low=float(ordered[rank - 1]),
        high=float(ordered[count - rank]),
    )


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


LOGGER = logging.getLogger(__name__)
TIMEOUT_S = 600
MODULE = "tasks.conversion.measure"
_PR_SET_PDEATHSIG = 1


class Footprint(BaseModel):
    """What one loaded copy of a variant takes."""

    model_config = ConfigDict(frozen=True)

    memory_bytes: int
    load_ms: float


class _Request(BaseModel):
    root: Path
    program: RegisteredProgram
    variants: tuple[BuiltVariant, ...]
    threads: int
    hardware_class: str
    batch: Path


def measure_footprints(
    variants: Sequence[BuiltVariant],
    program: RegisteredProgram,
    batch: ModelInputs,
    threads: int,
    hardware_class: str,
    store: ArtifactStore,
) -> dict[str, Footprint]:
    """Load each variant twice in a new process, one after the other, and measure the second copy.

    Args:
        variants: loaded by the caller before, so they do load.
        program: their source.
        batch: one call each, because runtimes take their working memory then.
        threads: of one call.
        hardware_class: what they are loaded on.
        store: holds their files.

    Returns:
        By name. A variant is missing where the process ended before it came to it; that is logged.

    Raises:
        StorageError: the disk for temporary files refused a write.
    """
    scratch = Path(tempfile.gettempdir())
    with refused_writes_explained(scratch), scratch_folder("falaj-footprint") as folder:
        file = folder / "batch.npz"
        np.savez(file, allow_pickle=False, **dict(batch))
        request = _Request(
            root=store.root,
            program=program,
            variants=tuple(variants),
            threads=threads,
            hardware_class=hardware_class,
            batch=file,
        )
        try:
            ended = subprocess.run(
                [sys.executable, "-m", MODULE],
                input=request.model_dump_json(),
                capture_output=True,
                text=True,
                cwd=PROJECT_ROOT,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            LOGGER.warning("memory was not measured: the process took over %s s", TIMEOUT_S)
            return {}
    found = dict(_answers(ended.stdout.splitlines()))
    if len(found) < len(variants):
        last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        LOGGER.warning(
            "memory of %d of %d variants was not measured: the process ended with %d (%s)",
            len(variants) - len(found),
            len(variants),
            ended.returncode,
            last,
        )
    return found


def _answers(lines: Iterable[str]) -> Iterable[tuple[str, Footprint]]:
    for line in lines:
        try:
            name, values = json.loads(line)
            yield name, Footprint.model_validate(values)
        except (ValueError, TypeError, ValidationError):
            continue  # a library's own line on standard output


def _resident_bytes() -> int:
    _, resident, *_ = Path("/proc/self/statm").read_text().split()
    return int(resident) * os.sysconf("SC_PAGE_SIZE")


def _give_back() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _measure(request: _Request) -> Iterable[tuple[str, Footprint]]:
    store, runtime = ArtifactStore(request.root), Runtime(request.threads, request.hardware_class)
    with np.load(request.batch) as arrays:
        batch = ModelInputs(dict(arrays))
    for variant in request.variants:
        first = load_variant(variant, request.program, runtime, store)
        first(batch)
        _give_back()
        before = _resident_bytes()
        second = load_variant(variant, request.program, runtime, store)
        second(batch)
        _give_back()
        taken = max(0, _resident_bytes() - before)
        yield variant.name, Footprint(memory_bytes=taken, load_ms=second.load_ms)
        del first, second


def main() -> None:
    """Read what to measure on standard input, write one line of JSON a variant."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # no orphan
    request = _Request.model_validate_json(sys.stdin.read())
    for name, footprint in _measure(request):
        sys.stdout.write(json.dumps([name, footprint.model_dump()]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
