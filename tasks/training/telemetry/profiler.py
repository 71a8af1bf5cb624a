"""Rank side of the profile: a few steps under torch.profiler, collectives in Horovod's timeline."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from tasks.contracts.base import Contract
from tasks.kernel.errors import refused_writes_explained
from tasks.kernel.files import write_atomically
from tasks.training.telemetry.step_clock import WARM_UP_STEPS

LOGGER = logging.getLogger(__name__)
WARM_PROFILED_STEPS = 1
NUM_STEPS = 5
"""Steps of a profile: enough for shares of a step, and a trace of a few megabytes."""
NUM_TOP = 8
MOST_TRACE_BYTES = 32 << 20
"""Of one rank, compressed; a larger trace is not kept, its summary is."""
TIMELINE = "horovod-timeline.json"
OperationKind = Literal["matmul", "optimizer", "move", "allocate", "exchange"]

# The first pattern that fits an operation's name says its kind; all else that torch computes moves
# every value through memory for little arithmetic.
_KINDS: tuple[tuple[OperationKind, str], ...] = (
    ("exchange", r"gloo|nccl|c10d|record_param_comms|all_?reduce|all_?gather|hvd|horovod"),
    ("optimizer", r"optimizer|_fused_(adam|sgd|adagrad)|_foreach_|_multi_tensor"),
    (
        "matmul",
        r"addmm|::b?mm$|baddbmm|::matmul|::linear|conv|mkldnn|onednn|gemm|attention|::lstm|::gru",
    ),
    ("allocate", r"::(empty|resize_|new_empty)|cudamalloc|cudafree|\[memory\]"),
)


class ProfileSummary(Contract):
    """Profile of one rank: content of `profile-0000N.json`."""

    rank: NonNegativeInt
    num_steps: PositiveInt
    step_s: NonNegativeFloat
    """Wall seconds of a profiled step; the profiler itself makes it longer."""
    seconds: dict[OperationKind, NonNegativeFloat]
    """Seconds of a step inside operations, by kind."""
    top: tuple[tuple[str, NonNegativeFloat], ...]
    """The operations that take most, with their seconds of a step."""
    trace: str | None
    """Name of the kept trace; None where it was larger than what is kept."""

    @property
    def operations_s(self) -> float:
        """Seconds of a step inside operations."""
        return sum(self.seconds.values())


def kind_of(name: str) -> OperationKind:
    """Kind of an operation, by its name."""
    name = name.lower()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name)), "move")


def profile_summary(
    rank: int, num_steps: int, wall_s: float, operations: Mapping[str, float], trace: str | None
) -> ProfileSummary:
    """Put a rank's profile together.

    Args:
        rank: whose.
        num_steps: profiled steps.
        wall_s: seconds of all of them.
        operations: name of each operation to its own seconds, without what it calls, in all steps.
        trace: name of the trace's file, None where it was not kept.
    """
    seconds: dict[OperationKind, float] = dict.fromkeys(get_args(OperationKind), 0.0)
    for name, spent_s in operations.items():
        seconds[kind_of(name)] += spent_s / num_steps
    heaviest = sorted(operations.items(), key=lambda item: -item[1])[:NUM_TOP]
    return ProfileSummary(
        rank=rank,
        num_steps=num_steps,
        step_s=wall_s / num_steps,
        seconds=seconds,
        top=tuple((name, spent_s / num_steps) for name, spent_s in heaviest),
        trace=trace,
    )


def profiler_variables(engine: str) -> dict[str, str]:
    """Environment that a rank needs to be profiled: Horovod records on request, later."""
    return {"HOROVOD_TIMELINE": "DYNAMIC"} if engine == "horovod" else {}


class StepProfiler:
    """Profiles `num_steps` steps of one rank, after the first few. Collective with Horovod.

    Usage: as a context around the training, `profiler.step()` after each step. The trace and its
    summary are written when the last profiled step is done.

    Args:
        folder: the run directory.
        rank: this rank's number.
        num_steps: steps to profile.
        with_timeline: True on Horovod with the environment of `profiler_variables`; rank 0 writes.
    """

    def __init__(
        self, folder: Path, rank: int, num_steps: int = NUM_STEPS, *, with_timeline: bool
    ) -> None:
        import torch.profiler

        self._folder = folder
        self._rank = rank
        self._num_steps = num_steps
        self._with_timeline = with_timeline
        self._step = 0
        self._first = WARM_UP_STEPS + WARM_PROFILED_STEPS
        self._began = 0.0
        self._wall_s = 0.0
        self._failed = False
        self._profile: Any = torch.profiler.profile(
            activities=torch.profiler.supported_activities(),  # type: ignore[no-untyped-call]
            schedule=torch.profiler.schedule(
                skip_first=WARM_UP_STEPS,
                wait=0,
                warmup=WARM_PROFILED_STEPS,
                active=num_steps,
                repeat=1,
            ),
            on_trace_ready=self._keep,
            acc_events=True,
        )

    def __enter__(self) -> Self:
        self._profile.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._failed = kind is not None
        if self._step < self._first + self._num_steps and not self._failed:
            LOGGER.warning(
                "the training ended after %d steps, before the profile's %d were done",
                self._step,
                self._first + self._num_steps,
            )
            self._num_steps = max(1, self._step - self._first)
            if self._began:
                self._wall_s = time.perf_counter() - self._began
                self._switch_timeline(on=False)
        self._profile.__exit__(kind, value, traceback)

    def step(self) -> None:
        """A training step is done.

        Raises:
            StorageError: the disk refused the trace.
        """
        self._step += 1
        if self._step == self._first:
            self._began = time.perf_counter()
            self._switch_timeline(on=True)
        elif self._step == self._first + self._num_steps:
            self._wall_s = time.perf_counter() - self._began
            self._switch_timeline(on=False)
        self._profile.step()

    def _switch_timeline(self, *, on: bool) -> None:
        if not self._with_timeline:
            return
        import horovod.torch as hvd

        if on:
            hvd.start_timeline(str(self._folder / TIMELINE))
        else:
            hvd.stop_timeline()

    def _keep(self, profile: Any) -> None:
        """Write trace and summary, whole or not at all; neither of a training that failed."""
        if self._failed:
            return
        name = f"trace-{self._rank:05d}.json.gz"
        operations = own_seconds(profile.key_averages())
        aside = self._folder / f".aside-{name}"
        with refused_writes_explained(aside):
            profile.export_chrome_trace(str(aside))
            num_bytes = aside.stat().st_size
            if num_bytes > MOST_TRACE_BYTES:
                aside.unlink()
                LOGGER.warning("the trace of %d bytes is too large and not kept", num_bytes)
            else:
                aside.replace(self._folder / name)
        summary = profile_summary(
            self._rank,
            self._num_steps,
            self._wall_s,
            operations,
            name if num_bytes <= MOST_TRACE_BYTES else None,
        )
        write_atomically(profile_path(self._folder, self._rank), summary.model_dump_json(indent=1))


def own_seconds(events: Iterable[Any]) -> dict[str, float]:
    """Operation to the seconds spent in it alone: on the device where one is used, else on CPU."""
    shown = [event for event in events if not event.key.startswith("ProfilerStep")]
    on_device = any(event.self_device_time_total for event in shown)
    found: dict[str, float] = {}
    for event in shown:
        own_us = event.self_device_time_total if on_device else event.self_cpu_time_total
        found[event.key] = found.get(event.key, 0.0) + own_us / 1e6
    return found


def profile_path(folder: Path, rank: int) -> Path:
    """Where the summary of a rank's profile lies."""
    return folder / f"profile-{rank:05d}.json"


def read_profiles(folder: Path) -> tuple[ProfileSummary, ...]:
    """Summaries of all ranks that were profiled, in rank order."""
    return tuple(
        ProfileSummary.model_validate_json(path.read_text())
        for path in sorted(folder.glob("profile-*.json"))
    )


def profile_files(folder: Path) -> tuple[Path, ...]:
    """Everything of a profile that is worth keeping with the model."""
    return tuple(
        path
        for pattern in ("trace-*.json.gz", "profile-*.json", TIMELINE)
        for path in sorted(folder.glob(pattern))
    )
