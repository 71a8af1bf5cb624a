"""Checkpoints of several ranks: on S3, on a disk that refuses, and for another number of ranks."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pyarrow.fs import FileSelector, S3FileSystem

from tasks.contracts.training import EpochMetrics
from tasks.kernel.errors import StorageError, TransientError
from tasks.training.core.run_directory import ACCESS_FILE
from tests.support.host.processes import pids_whose_command_holds
from tests.support.ranks import runs
from tests.support.services.servers import s3_server

SECRET = "marker-of-a-secret-40c2a9"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, S3FileSystem]]:
    """An S3 service with a bucket; the driver, and it alone, has the keys in its environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with s3_server(secret=SECRET) as endpoint:
        s3 = S3FileSystem(endpoint_override=endpoint, allow_bucket_creation=True)
        s3.create_dir("lake")
        yield endpoint, s3


def objects(s3: S3FileSystem) -> list[str]:
    found = s3.get_file_info(FileSelector("lake", recursive=True))
    return [info.path for info in found if info.is_file]


@pytest.mark.slow
def test_a_run_with_checkpoints_on_s3_goes_on_from_there_and_leaves_nothing(
    bucket: tuple[str, S3FileSystem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, s3 = bucket
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    on_s3 = {"uri": "s3://lake/runs", "every_s": 0.2}
    seen: list[bytes] = []
    modes: list[int] = []

    def look_and_kill(metrics: EpochMetrics) -> None:
        if metrics.epoch == 1:
            for pid in pids_whose_command_holds(str(tmp_path / "work")):
                seen.append(Path(f"/proc/{pid}/cmdline").read_bytes())
                seen.append(Path(f"/proc/{pid}/environ").read_bytes())
            modes.extend(
                file.stat().st_mode & 0o777 for file in tmp_path.glob(f"work/*/{ACCESS_FILE}")
            )
            os.kill(runs.pid_of_rank(1, tmp_path), signal.SIGKILL)

    with pytest.raises(TransientError, match="rank 1 was killed"):
        runs.train(tmp_path, runs.config(checkpoints=on_s3), look_and_kill)
    assert modes == [0o600]
    assert len(seen) >= 8  # two guards and two ranks
    assert not any(SECRET.encode() in text for text in seen)
    assert not list(tmp_path.glob(f"work/*/{ACCESS_FILE}"))
    assert any(name.endswith("/manifest.json") for name in objects(s3))
    model = runs.train(tmp_path, runs.config(checkpoints=on_s3))
    log = runs.log_of(model, tmp_path)
    assert "of an earlier attempt" in log
    assert runs.finished_epochs(log.split("--- attempt at")[2])[0] > 1
    assert [metrics.epoch for metrics in model.epochs] == list(range(runs.CONFIG.max_epochs))
    assert SECRET not in log
    assert objects(s3) == []


def test_a_place_that_refuses_checkpoints_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    refusing = runs.config(**runs.on_ranks(1), checkpoints={"uri": "file:///dev/full/checkpoints"})
    with pytest.raises(StorageError, match=r"^rank 0: StorageError: .*the disk refused a write"):
        runs.train(tmp_path, refusing)


@pytest.mark.slow
def test_fewer_ranks_go_on_with_a_network_that_was_cut_over_more(tmp_path: Path) -> None:
    class CutError(Exception):
        """The driver ends here."""

    def cut_after_two(metrics: EpochMetrics) -> None:
        if metrics.epoch == 1:
            raise CutError

    strategy = {"name": "fsdp"}
    unbroken = runs.train(tmp_path / "unbroken", runs.config(strategy=strategy))
    with pytest.raises(CutError):
        runs.train(tmp_path / "cut", runs.config(strategy=strategy), cut_after_two)
    continued = runs.train(tmp_path / "cut", runs.config(strategy=strategy, **runs.on_ranks(1)))
    assert "resumed after epoch" in runs.log_of(continued, tmp_path / "cut")
    assert continued.num_ranks == 1
    np.testing.assert_allclose(
        runs.losses(continued.epochs), runs.losses(unbroken.epochs), rtol=1e-5
    )
