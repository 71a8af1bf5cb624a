"""What the driver does while ranks run: it passes on epochs and lines, and keeps the deadlines.

In the end it makes one error of ours of what ranks reported and how they ended.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Self

from tasks.contracts.training import EpochMetrics
from tasks.kernel import errors
from tasks.training.core.run_directory import (
    EXIT_REPORT_REFUSED,
    RankError,
    RunDirectory,
    TrainingJob,
)
from tasks.training.launch.rank_group import RankGroup, end_in_words, error_of_rank
from tasks.training.telemetry.step_clock import ClockReading, read_clocks

LOGGER = logging.getLogger(__name__)
LINE_EVERY_S = 10.0
# How a rank's line says its level: our own lines with a word, Horovod's core with a letter behind
# the time. Any other line (a traceback, a library's print) is for the file alone.
LEVEL_PATTERN = re.compile(r"(?:(DEBUG|INFO|WARNING|ERROR) |\[[^]]*: ([WEF]) )")
OF_CORE = {"W": logging.WARNING, "E": logging.ERROR, "F": logging.ERROR}


class RankLog:
    """Writes every line into a file, and passes those with a level above debug on to the log.

    Raises:
        StorageError: the disk refused a write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with errors.refused_writes_explained(path):
            self._file = path.open("a", encoding="utf-8")
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def note(self, line: str) -> None:
        """Write a line of the driver itself, into the file only."""
        with errors.refused_writes_explained(self._path):
            self._file.write(f"{line}\n")
            self._file.flush()

    def add(self, rank: int | str, line: str) -> None:
        """Take one line that a rank printed; `rank` is its number, or its place in words."""
        who = f"rank {rank}" if isinstance(rank, int) else rank
        self.note(f"{time.monotonic() - self._started:8.1f} s  {who} | {line}")
        match = LEVEL_PATTERN.match(line)
        if match is None:
            return
        level = getattr(logging, match[1]) if match[1] else OF_CORE[match[2]]
        if level > logging.DEBUG:
            LOGGER.log(level, "%s: %s", who, line[match.end() :] if match[1] else line)


# After a first rank has failed, how long the others may take to notice and report.
SETTLE_S = 5.0

OnEpoch = Callable[[EpochMetrics], None]


class RunMonitor:
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
        self._last_progress: dict[int, str] = {}
        self._logged_at = self._started
        self._first_seen: tuple[float, int] | None = None

    def check(self) -> None:
        """Pass on new epochs and progress, and keep the time limit.

        Raises:
            TrainingError: the attempt takes too long.
        """
        self.report_epochs()
        self._read_progress()
        if time.monotonic() - self._started > self._config.time_limit_s:
            raise errors.TrainingError(
                f"training did not end within time_limit_s={self._config.time_limit_s}; it has "
                f"done {self._num_epochs} epoch(s). Raise the limit and run again: it resumes from "
                "its newest checkpoint"
            )

    def check_ranks(self, ranks: RankGroup) -> None:
        """As `check`, and stop the ranks that a failed one has left behind, or that are stuck.

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
        self.check()
        self._check_for_progress(now)

    def report_epochs(self) -> None:
        """Pass on the epochs that rank 0 has finished since the last call."""
        epochs = self._run.read_epochs()
        for metrics in epochs[self._num_epochs :]:
            self._on_epoch(metrics)
        self._num_epochs = max(self._num_epochs, len(epochs))

    def _read_progress(self) -> None:
        """Note where each rank is, and log now and then the one that is furthest behind."""
        now, clocks = time.monotonic(), read_clocks(self._run.path)
        progress = {clock.rank: clock.progress for clock in clocks}
        if progress != self._last_progress:
            self._last_progress, self._progress_at = progress, now
        training = [c for c in clocks if c.epoch is not None and c.num_steps_to_do]
        if training and now - self._logged_at >= LINE_EVERY_S:
            self._logged_at = now
            behind = min(training, key=lambda clock: (clock.epoch, clock.step))
            rows_per_s = sum(clock.rows_per_s or 0 for clock in training)
            LOGGER.info("%s", self._how_far(behind, now, rows_per_s))

    def _how_far(self, clock: ClockReading, now: float, rows_per_s: float) -> str:
        epoch, steps, most = clock.epoch or 0, clock.num_steps_to_do or 0, self._config.max_epochs
        done = epoch * steps + clock.step
        text = f"epoch {epoch + 1} of {most}, step {clock.step} of {steps}, {rows_per_s:.0f} rows/s"
        first_s, first = self._first_seen or (now, done)
        if done <= first:  # nothing to compare with, or resumed from an earlier checkpoint
            self._first_seen = now, done
            return text
        self._first_seen = first_s, first
        left_s = (most * steps - done) * (now - first_s) / (done - first)
        return f"{text}, about {left_s / 60:.1f} min left"

    def _check_for_progress(self, now: float) -> None:
        """A rank that waits for another reports nothing either: so all must be silent."""
        silence_s = now - self._progress_at
        if silence_s > self._config.progress_timeout_s:
            last = "; ".join(
                f"rank {rank}: {text}" for rank, text in sorted(self._last_progress.items())
            )
            raise errors.TransientError(
                f"no rank has made progress for {silence_s:.0f} s (limit progress_timeout_s="
                f"{self._config.progress_timeout_s}); last seen: "
                f"{last or 'nothing, as the ranks had not met'}. All ranks were stopped. A new "
                f"attempt resumes from the newest checkpoint; all lines are in {self._run.log}"
            )


def failure_of(
    run: RunDirectory, exit_codes: Mapping[int, int], stopped: Set[int]
) -> errors.FalajError | None:
    """The error that a run's end means; None where all ranks ended well.

    Args:
        run: where ranks reported their errors.
        exit_codes: of all ranks; 128 plus n where signal n ended the rank.
        stopped: ranks that the driver stopped because others had failed.
    """
    failed = {rank: code for rank, code in exit_codes.items() if code != 0}
    if not failed:
        return None
    reported = run.read_errors()
    if causes := [error for error in reported if not error.secondary]:
        cause = causes[0]
        message = f"{cause.message}. All lines are in {run.log}"
        return error_of_rank(f"rank {cause.rank}", cause.kind, message, cause.traceback)
    return _unreported(run, failed, reported, stopped)


def _unreported(
    run: RunDirectory, failed: Mapping[int, int], reported: Sequence[RankError], stopped: Set[int]
) -> errors.FalajError:
    """No rank names a cause: name those that ended without a report."""
    silent = {
        rank: code
        for rank, code in failed.items()
        if rank not in stopped and rank not in {error.rank for error in reported}
    }
    if EXIT_REPORT_REFUSED in silent.values():
        return errors.StorageError(
            f"a rank could not write its report into {run.path}: the disk is full or read-only. "
            "Free space or mend the permissions and run again; whole checkpoints are kept"
        )
    ends = [f"rank {rank} {end_in_words(code)}" for rank, code in sorted(silent.items())]
    ends += [f"rank {error.rank}: {error.kind}: {error.message}" for error in reported]
    ends += [f"rank {rank} did not answer and was stopped" for rank in sorted(stopped)]
    return errors.TransientError(
        f"{'; '.join(ends)}. A new attempt goes on from the newest checkpoint; all lines are in "
        f"{run.log}"
    )
