"""Rank side of the profile: a few steps under torch.profiler, collectives in Horovod's timeline."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Self

from tasks.kernel.errors import refused_writes_explained
from tasks.training.telemetry.step_clock import WARM_UP_STEPS

LOGGER = logging.getLogger(__name__)
WARM_PROFILED_STEPS = 1
NUM_STEPS = 5
"""Steps of a profile: enough for shares of a step, and a trace of a few megabytes."""
TIMELINE = "horovod-timeline.json"


def profiler_variables(engine: str) -> dict[str, str]:
    """Environment that a rank needs to be profiled: Horovod records on request, later."""
    return {"HOROVOD_TIMELINE": "DYNAMIC"} if engine == "horovod" else {}


class StepProfiler:
    """Profiles `num_steps` steps of one rank, after the first few. Collective with Horovod.

    Usage: as a context around the training, `profiler.step()` after each step. The trace is written
    when the last profiled step is done; a training that failed leaves none.

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

        self._path = folder / f"trace-{rank:05d}.json.gz"
        self._timeline = str(folder / TIMELINE) if with_timeline else None
        self._first = WARM_UP_STEPS + WARM_PROFILED_STEPS
        self._last = self._first + num_steps
        self._step = 0
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
