"""What the driver looks after while ranks run: epochs, progress, failures and deadlines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tasks.contracts.training import EpochMetrics
from tasks.kernel.errors import TrainingError, TransientError
from tasks.training.core.run_directory import RankProgress, RunDirectory, TrainingJob
from tasks.training.launch.eta import Eta, Position
from tasks.training.launch.rank_group import RankGroup

LOGGER = logging.getLogger(__name__)
# After a first rank has failed, how long the others may take to notice and report.
SETTLE_S = 5.0

OnEpoch = Callable[[EpochMetrics], None]


class Watch:
    """Passes on what ranks report, and keeps the deadlines of one attempt.

    Args:
        run: where ranks report.
        job: what they do.
        on_epoch: called after each epoch.
    """

    def __init__(self, run: RunDirectory, job: TrainingJob, on_epoch: OnEpoch) -> None:
        self._run = run
        self._config = job.config
        self._on_epoch = on_epoch
        self._num_epochs = 0
        self._started = time.monotonic()
        self._failed_at: float | None = None
        self._progress_at = self._started
        self._last_said: dict[int, RankProgress] = {}
        self._eta: Eta | None = None

    def look(self) -> None:
        """Pass on new epochs and progress, and keep the time limit.

        Raises:
            TrainingError: the attempt takes too long.
        """
        self.report_epochs()
        self._read_progress()
        self._tell_eta()
        if time.monotonic() - self._started > self._config.time_limit_s:
            raise TrainingError(
                f"training did not end within time_limit_s={self._config.time_limit_s}; it has "
                f"done {self._num_epochs} epoch(s). Raise the limit and run again: it goes on from "
                "its newest checkpoint"
            )

    def look_after(self, ranks: RankGroup) -> None:
        """As `look`, and stop the ranks that a failed one has left behind, or that are stuck.

        Raises:
            TransientError: no rank has made progress for too long.
            TrainingError: the attempt takes too long.
        """
        now = time.monotonic()
        if any(ranks.exit_codes.values()):
            self.report_epochs()
            self._failed_at = self._failed_at or now
            if now - self._failed_at > SETTLE_S:
                ranks.stop()
            return
        self.look()
        self._check_progress(now)

    def report_epochs(self) -> None:
        """Pass on the epochs that rank 0 has finished since the last call."""
        epochs = self._run.read_epochs()
        for metrics in epochs[self._num_epochs :]:
            self._on_epoch(metrics)
        self._num_epochs = max(self._num_epochs, len(epochs))

    def _read_progress(self) -> None:
        for rank, progress in self._run.read_all_progress().items():
            if self._last_said.get(rank) != progress:
                self._last_said[rank] = progress
                self._progress_at = time.monotonic()

    def _tell_eta(self) -> None:
        """Say how far the rank is that is furthest behind, once it is known how far there is."""
        plan = self._run.read_plan()
        positions = [
            Position(said.epoch, said.step)
            for said in self._last_said.values()
            if said.epoch is not None and said.step is not None
        ]
        if plan is None or not positions:
            return
        self._eta = self._eta or Eta(
            self._config.max_epochs, plan.steps_per_epoch, plan.rows_per_step
        )
        furthest_behind = min(positions, key=lambda position: (position.epoch, position.step))
        if line := self._eta.line(time.monotonic(), furthest_behind):
            LOGGER.info("%s", line)

    def _check_progress(self, now: float) -> None:
        """A rank that waits for another says nothing either: so all must be silent."""
        silence_s = now - self._progress_at
        if silence_s > self._config.progress_timeout_s:
            said = self._last_said.items()
            last = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(said))
            raise TransientError(
                f"no rank has made progress for {silence_s:.0f} s (limit progress_timeout_s="
                f"{self._config.progress_timeout_s}); last seen: {last or 'nothing yet'}. All "
                "ranks were stopped. A new attempt goes on from the newest checkpoint; all lines "
                f"are in {self._run.log}"
            )
