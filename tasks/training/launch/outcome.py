"""From the ends of the ranks to one error of ours, as a sentence that names the rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from tasks.kernel.errors import FalajError, StorageError, TransientError
from tasks.training.core.run_directory import EXIT_REPORT_REFUSED, RankError, RunDirectory
from tasks.training.launch.processes import end_in_words, error_of_rank


def failure_of(
    run: RunDirectory, exit_codes: Mapping[int, int], stopped: Set[int]
) -> FalajError | None:
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
    run: RunDirectory,
    failed: Mapping[int, int],
    reported: Sequence[RankError],
    stopped: Set[int],
) -> FalajError:
    """No rank names a cause: tell of the ranks that ended without a word."""
    silent = {
        rank: code
        for rank, code in failed.items()
        if rank not in stopped and rank not in {error.rank for error in reported}
    }
    if EXIT_REPORT_REFUSED in silent.values():
        return StorageError(
            f"a rank could not write its report into {run.path}: the disk is full or read-only. "
            "Free space or mend the permissions and run again; whole checkpoints are kept"
        )
    ends = [f"rank {rank} {end_in_words(code)}" for rank, code in sorted(silent.items())]
    ends += [f"rank {error.rank}: {error.kind}: {error.message}" for error in reported]
    ends += [f"rank {rank} did not answer and was stopped" for rank in sorted(stopped)]
    return TransientError(
        f"{'; '.join(ends)}. A new attempt goes on from the newest checkpoint; all lines are in "
        f"{run.log}"
    )
