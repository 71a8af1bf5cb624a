from pathlib import Path

import pytest
import torch.distributed as dist
from horovod.common.exceptions import HorovodInternalError

from tasks.kernel.errors import DataContractError, StorageError, TrainingError, TransientError
from tasks.training.core.run_directory import EXIT_REPORT_REFUSED, RankError, RunDirectory
from tasks.training.launch.monitor import failure_of
from tasks.training.launch.worker import is_loss_of_another_rank


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def report(
    run: RunDirectory, rank: int, kind: str, time_s: float = 0, *, secondary: bool = False
) -> None:
    run.write_error(
        RankError(
            rank=rank,
            kind=kind,
            message="what was seen",
            traceback="Traceback (most recent call last): ...",
            secondary=secondary,
            time_s=time_s,
        )
    )


def test_the_earliest_error_that_is_not_secondary_is_the_cause(run: RunDirectory) -> None:
    report(run, 0, "HorovodInternalError", 1.0, secondary=True)
    report(run, 1, "DataContractError", 3.0)
    report(run, 2, "ValueError", 4.0)
    failure = failure_of(run, {0: 1, 1: 1, 2: 1}, set())
    assert isinstance(failure, DataContractError)
    assert str(failure).startswith("rank 1: DataContractError: what was seen")
    assert "Traceback of rank 1" in failure.__notes__[0]


def test_an_error_that_is_none_of_ours_becomes_a_training_error(run: RunDirectory) -> None:
    kind = "annotations"  # a name in the module of our errors, but no error
    report(run, 0, kind)
    failure = failure_of(run, {0: 1}, set())
    assert type(failure) is TrainingError
    assert str(failure).startswith(f"rank 0: {kind}: what was seen")


def test_a_rank_that_was_stopped_is_not_called_killed(run: RunDirectory) -> None:
    report(run, 0, "HorovodInternalError", secondary=True)
    failure = failure_of(run, {0: 1, 1: 143}, {1})
    assert isinstance(failure, TransientError)
    assert "rank 0: HorovodInternalError" in str(failure)
    assert "rank 1 did not answer and was stopped" in str(failure)
    assert "killed" not in str(failure)


def test_other_ends_without_a_report_are_named(run: RunDirectory) -> None:
    assert failure_of(run, {0: 0, 1: 0}, set()) is None
    failure = failure_of(run, {0: 139, 1: 7, 2: 137}, set())
    assert isinstance(failure, TransientError)
    text = str(failure)
    assert "rank 2 was killed (signal 9; out of memory?)" in text
    assert "rank 0 was ended by signal 11 (Segmentation fault)" in text
    assert "rank 1 ended with exit code 7 and without a report" in text


def test_a_rank_that_could_not_report_means_a_full_disk(run: RunDirectory) -> None:
    report(run, 0, "HorovodInternalError", secondary=True)
    assert isinstance(failure_of(run, {0: 1, 1: EXIT_REPORT_REFUSED}, set()), StorageError)


GLOO = "[/src/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"


@pytest.mark.parametrize(
    ("error", "is_anothers"),
    [
        (HorovodInternalError("shut down"), True),
        (dist.DistNetworkError("gone"), True),
        (RuntimeError(GLOO), True),
        *((own, False) for own in (RuntimeError("shape mismatch"), MemoryError(), KeyError("x"))),
        (ValueError(GLOO), False),
    ],
)
def test_only_an_exchange_that_broke_is_laid_to_another_rank(
    error: Exception, is_anothers: bool
) -> None:
    assert is_loss_of_another_rank(error) is is_anothers
