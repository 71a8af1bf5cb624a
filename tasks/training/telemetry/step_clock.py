"""A rank's stopwatch: what its steps spend their time on, for a few microseconds a step.

Every moment belongs to exactly one phase, so phases add up to the time that passed; a phase inside
another one takes its time from it. A thread writes what was measured beside the other files of the
run directory every few seconds, so nothing is written in a step, and a rank that is stuck still
says in which phase.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

import psutil
from pydantic import NonNegativeFloat, NonNegativeInt, ValidationError

from tasks.contracts.telemetry import PhaseTime, RankTelemetry
from tasks.kernel.errors import StorageError, refused_writes_explained
from tasks.kernel.files import write_atomically

LOGGER = logging.getLogger(__name__)
Phase = Literal["data", "compute", "exchange", "validate", "checkpoint"]
PhaseName = Literal["data", "compute", "exchange", "validate", "checkpoint", "other"]

PHASES: tuple[PhaseName, ...] = get_args(PhaseName)
STEP_PHASES: tuple[PhaseName, ...] = ("data", "compute", "exchange")
"""What a training step is made of."""
OTHER = PHASES.index("other")

WRITE_EVERY_S = 2.0
WARM_UP_STEPS = 3
"""First steps build what later ones reuse (optimizer state, compiled code, connections)."""

KEPT_STEPS = 2000
"""Newest steps, of which quantiles are computed."""


class ClockReading(RankTelemetry):
    """What a rank's clock shows: the content of `telemetry-0000N.json`."""

    pid: NonNegativeInt
    phase: PhaseName
    """What the rank is in at this moment."""
    elapsed_s: NonNegativeFloat
    doing: str
    epoch: int | None
    step: NonNegativeInt
    """How far it is in what it is doing."""
    num_steps_to_do: NonNegativeInt | None = None
    """In an epoch."""

    @property
    def progress(self) -> str:
        """What the rank does, as far as it has come; the same while it is stuck."""
        epoch = "" if self.epoch is None else f", epoch {self.epoch}"
        return f"{self.doing}{epoch}, step {self.step}"


def _disk_bytes() -> tuple[int | None, int | None]:
    """Read and written by this process; None where the kernel does not tell."""
    try:
        counted = psutil.Process().io_counters()
    except (psutil.Error, OSError, AttributeError, RuntimeError, ValueError):
        return None, None
    return counted.read_bytes, counted.write_bytes


CLOCKS = "telemetry-*.json"
"""The clocks of all ranks in a run directory."""


def clock_path(folder: Path, rank: int) -> Path:
    """Where the clock of a rank is written."""
    return folder / f"telemetry-{rank:05d}.json"


def read_clocks(folder: Path) -> list[ClockReading]:
    """What the clocks of all ranks showed when they were last written, by rank."""
    found = []
    for path in sorted(folder.glob(CLOCKS)):
        try:
            found.append(ClockReading.model_validate_json(path.read_text()))
        except (OSError, ValidationError) as exc:  # of a shared folder; the next look may do
            LOGGER.debug("%s cannot be read: %s", path, exc)
    return found


class StepClock:
    """Measures one rank. To be used in one thread, that of the training loop.

    Usage: `with clock.phase("data"): ...` around what belongs to a phase, `clock.step()` after each
    training step, `clock.close()` at the end. What is in no phase counts as `other`.

    Args:
        folder: the run directory.
        rank: this rank's number.
        write_every_s: how often it is written.
    """

    def __init__(self, folder: Path, rank: int, write_every_s: float = WRITE_EVERY_S) -> None:
        self._path = clock_path(folder, rank)
        self._rank = rank
        self._host = socket.gethostname()
        self._num_steps = self._num_rows = self._wire_bytes = 0
        self._warm_rows = 0
        self._ns = [0] * len(PHASES)
        self._cpu_ns = [0] * len(PHASES)
        self._warm_ns = list(self._ns)
        self._warm_cpu_ns = list(self._ns)
        self._stepped_ns = 0
        self._step_ns: deque[int] = deque(maxlen=KEPT_STEPS)
        self._outer: list[int] = []
        self._current = OTHER
        self._phases = {name: _Phase(self, index) for index, name in enumerate(PHASES)}
        self._started_ns = self._since_ns = time.perf_counter_ns()
        self._since_cpu_ns = time.thread_time_ns()
        self._started_cpu_s = time.process_time()
        self._doing = "starting"
        self._epoch: int | None = None
        self._step = 0
        self._to_do: int | None = None
        self._refused: StorageError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._write_now_and_then, args=(write_every_s,), name="step-clock", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def phase(self, name: Phase) -> _Phase:
        """A context whose time counts for the phase, without that of phases inside it."""
        return self._phases[name]

    def begin(self, doing: str, num_steps: int | None = None) -> None:
        """The rank does something else from now on, in so many steps."""
        self._doing, self._epoch, self._step, self._to_do = doing, None, 0, num_steps

    def advance(self, epoch: int | None = None, step: int | None = None) -> None:
        """The rank has come further in what it does.

        Args:
            epoch: the epoch that it belongs to, if any.
            step: steps done of it; none: counted here.
        """
        self._epoch, self._step = epoch, self._step + 1 if step is None else step

    def add_rows(self, num_rows: int) -> None:
        """Count rows that this rank trained on."""
        self._num_rows += num_rows

    def add_bytes(self, num_bytes: int) -> None:
        """Count bytes that this rank gave to the network."""
        self._wire_bytes += num_bytes

    def step(self) -> None:
        """A training step is done.

        Raises:
            StorageError: the disk refused to take an earlier reading.
        """
        if self._refused is not None:
            raise self._refused
        self._switch(self._current)
        self._num_steps += 1
        if self._num_steps <= WARM_UP_STEPS:
            self._warm_ns, self._warm_cpu_ns = list(self._ns), list(self._cpu_ns)
            self._warm_rows = self._num_rows
        else:
            self._step_ns.append(self._spent_on_steps() - self._stepped_ns)
        self._stepped_ns = self._spent_on_steps()

    def _spent_on_steps(self) -> int:
        return sum(self._ns[: len(STEP_PHASES)])

    def close(self) -> None:
        """Write the last reading.

        Raises:
            StorageError: the disk refused a write.
        """
        self._stop.set()
        self._thread.join()
        self._switch(self._current)
        self._write()

    def reading(self) -> ClockReading:
        """What the clock shows now. In another thread counts may be a step apart."""
        usage, (read, written) = resource.getrusage(resource.RUSAGE_SELF), _disk_bytes()
        # What the first steps took is read before the rest, which only grows meanwhile.
        is_warm, warm = self._num_steps > WARM_UP_STEPS, (self._warm_ns, self._warm_cpu_ns)
        warm_rows, num_rows = self._warm_rows, self._num_rows
        current, since_ns = self._current, self._since_ns
        now_ns = time.perf_counter_ns()
        ns, cpu_ns = list(self._ns), list(self._cpu_ns)
        ns[current] += max(0, now_ns - since_ns)
        phases: dict[str, PhaseTime] = {
            name: PhaseTime(
                seconds=ns[index] / 1e9,
                cpu_s=cpu_ns[index] / 1e9,
                steady_s=(ns[index] - warm[0][index]) / 1e9 if is_warm else 0.0,
                steady_cpu_s=(cpu_ns[index] - warm[1][index]) / 1e9 if is_warm else 0.0,
            )
            for index, name in enumerate(PHASES)
        }
        steps, steady_s = sorted(self._step_ns.copy()), sum(phases[n].steady_s for n in STEP_PHASES)
        elapsed_s, cpu_s = (now_ns - self._started_ns) / 1e9, time.process_time()
        return ClockReading(
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            phase=PHASES[current],
            elapsed_s=elapsed_s,
            doing=self._doing,
            epoch=self._epoch,
            step=self._step,
            num_steps_to_do=self._to_do,
            num_steps=self._num_steps,
            num_rows=num_rows,
            rows_per_s=(num_rows - warm_rows) / steady_s if steady_s else None,
            wire_bytes=self._wire_bytes,
            phases=phases,
            step_p50_s=quantile(steps, 0.50),
            step_p95_s=quantile(steps, 0.95),
            cpu_s=cpu_s,
            peak_memory_bytes=usage.ru_maxrss * 1024,
            major_faults=usage.ru_majflt,
            busy_cores_mean=(cpu_s - self._started_cpu_s) / elapsed_s if elapsed_s else None,
            busy_cores_max=None,
            disk_read_bytes=read,
            disk_written_bytes=written,
        )

    def _switch(self, index: int) -> None:
        """Give the time since the last switch to the current phase, and begin another."""
        now_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        current = self._current
        self._ns[current] += now_ns - self._since_ns
        self._cpu_ns[current] += cpu_ns - self._since_cpu_ns
        self._since_ns, self._since_cpu_ns, self._current = now_ns, cpu_ns, index

    def _write_now_and_then(self, every_s: float) -> None:
        """The first time at once: the driver learns from it which process the rank is."""
        try:
            self._write()
            while not self._stop.wait(every_s):
                self._write()
        except StorageError as exc:  # raised in the loop's thread, by the next step
            self._refused = exc

    def _write(self) -> None:
        """Not flushed to disk: after a power cut there is no run to report."""
        write_atomically(self._path, self.reading().model_dump_json(), durable=False)


class _Phase:
    """One phase as a context; entering and leaving it costs about a microsecond."""

    __slots__ = ("_clock", "_index")

    def __init__(self, clock: StepClock, index: int) -> None:
        self._clock = clock
        self._index = index

    def __enter__(self) -> None:
        self._clock._outer.append(self._clock._current)
        self._clock._switch(self._index)

    def __exit__(self, *_: object) -> None:
        self._clock._switch(self._clock._outer.pop())


def quantile(ordered: Sequence[int], share: float) -> float | None:
    """Seconds below which `share` of some times (nanoseconds) lie; None where there are none."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] / 1e9 if ordered else None


WARM_PROFILED_STEPS = 1
NUM_STEPS = 5
"""Steps of a profile: enough for shares of a step, and a trace of a few megabytes."""
TIMELINE = "horovod-timeline.json"


class StepProfiler:
    """Profiles `NUM_STEPS` steps of one rank, after the first few. Collective with Horovod.

    Usage: as a context around the training, `profiler.step()` after each step. The trace is written
    when the last profiled step is done; a training that failed leaves none.

    Args:
        folder: the run directory.
        rank: this rank's number.
        with_timeline: True on Horovod, with `HOROVOD_TIMELINE=DYNAMIC`; rank 0 writes.
    """

    def __init__(self, folder: Path, rank: int, *, with_timeline: bool) -> None:
        import torch.profiler

        self._path = folder / f"trace-{rank:05d}.json.gz"
        self._timeline = str(folder / TIMELINE) if with_timeline else None
        self._first = WARM_UP_STEPS + WARM_PROFILED_STEPS
        self._last = self._first + NUM_STEPS
        self._step = 0
        self._failed = False
        self._profile: Any = torch.profiler.profile(
            activities=torch.profiler.supported_activities(),  # type: ignore[no-untyped-call]
            schedule=torch.profiler.schedule(
                skip_first=WARM_UP_STEPS,
                wait=0,
                warmup=WARM_PROFILED_STEPS,
                active=NUM_STEPS,
                repeat=1,
            ),
            on_trace_ready=self._keep,
            acc_events=True,
        )

    def __enter__(self) -> Self:
        self._profile.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._failed = kind is not None
        if self._step < self._last and not self._failed:
            LOGGER.warning("the training ended before the %d steps of a profile", self._last)
            if self._step >= self._first:
                self._end_timeline()
        self._profile.__exit__(kind, *rest)

    def step(self) -> None:
        """A training step is done.

        Raises:
            StorageError: the disk refused the trace.
        """
        self._step += 1
        if self._step == self._first and self._timeline is not None:
            import horovod.torch as hvd

            hvd.start_timeline(self._timeline)
        elif self._step == self._last:
            self._end_timeline()
        self._profile.step()

    def _end_timeline(self) -> None:
        if self._timeline is not None:
            import horovod.torch as hvd

            hvd.stop_timeline()

    def _keep(self, profile: Any) -> None:
        """Write the trace, whole or not at all."""
        if self._failed:
            return
        aside = self._path.with_name(f".aside-{self._path.name}")
        with refused_writes_explained(aside):
            profile.export_chrome_trace(str(aside))
            aside.replace(self._path)


def profile_files(folder: Path) -> tuple[Path, ...]:
    """Everything of a profile that is worth keeping with the model."""
    return (*sorted(folder.glob("trace-*.json.gz")), *folder.glob(TIMELINE))
