"""Ranks read their rows from S3: what they bring, and what a bad store does to them."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.kernel.errors import TransientError
from tasks.kernel.files import digest_of
from tasks.kernel.location import Location
from tasks.kernel.parts import PARTIAL, PARTS_FILE, RemoteFile
from tasks.kernel.settings import ArtifactStore
from tasks.training.core.run_directory import RunDirectory, TrainingJob, TrainingRequest
from tasks.training.data.decode import SnapshotFile
from tasks.training.data.opening import Sources, open_sources
from tasks.training.launch.launcher import launch_training
from tests.support.data.builders import COLUMNS, dataset, frame, splits
from tests.support.host.wrong_store import WrongStore
from tests.support.ranks import runs
from tests.support.training.reading_ranks import job
from tests.support.training.thread_ranks import ThreadCommunicator, on_threads

HOSTS = 4
ROWS = 32_000


@pytest.fixture
def remote(s3: str, bucket: str, tmp_path: Path) -> TrainingJob:
    """A job whose rows are in the bucket."""
    here = ArtifactStore(tmp_path / "built", Location.of(bucket))
    snapshot = dataset(here, frame(ROWS)).snapshot
    assert snapshot.parts is not None
    digests = snapshot.data.sha256, snapshot.parts.sha256
    found = RemoteFile(path=tmp_path, url=bucket, sha256=digests[0], parts_sha256=digests[1])
    return job(tmp_path).model_copy(update={"remote": found})


def open_on_hosts(
    work: TrainingJob, folder: Path, size: int, on_progress: Callable[[], None] = lambda: None
) -> list[Sources]:
    """Each rank on a host of its own."""

    def open_rank(ranks: ThreadCommunicator) -> Sources:
        host = folder / f"host-{ranks.rank}"
        path = host / PARTIAL / "data.parquet"
        assert work.remote is not None
        remote = work.remote.model_copy(update={"path": path})
        own = work.model_copy(update={"snapshot_path": path, "remote": remote})
        run = RunDirectory(host)
        with run.access_handed_over(own, os.environ):
            return open_sources(own, ranks, run, on_progress)

    return on_threads(size, open_rank)


def test_each_host_brings_its_share_of_the_rows_and_the_footer(
    remote: TrainingJob, wrong: WrongStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Row groups are dealt whole, as those of a snapshot of millions of rows.
    monkeypatch.setattr("tasks.training.data.decode.BLOCKS_PER_SHARD", 4)
    (data,) = tmp_path.glob("built/snapshots/*/data.parquet")
    parts = json.loads(data.with_name(PARTS_FILE).read_text())
    windows = remote.splits.train, remote.splits.validation
    local = SnapshotFile(data, COLUMNS, remote.config.num_shards)
    used = sum(parts[number][0] for window in windows for number in local.groups(window))
    assert used < 0.8 * data.stat().st_size, "rows of neither window stay where they are"
    open_on_hosts(remote, tmp_path, HOSTS)
    digests = data.with_name(PARTS_FILE).stat().st_size
    assert wrong.sent_bytes <= 1.2 * used + HOSTS * (parts[-1][0] + digests)


def test_a_store_that_fails_midway_is_a_wait_and_the_next_attempt_goes_on(
    remote: TrainingJob, wrong: WrongStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.kernel.location.RETRIES", 0)
    looked_at: list[int] = []

    def fail_midway() -> None:
        looked_at.append(1)
        wrong.busy = 1000 if len(looked_at) == 40 else 0

    with pytest.raises(TransientError, match=r"objects/.*the store does not answer .*503"):
        open_on_hosts(remote, tmp_path, 1, fail_midway)
    before, wrong.busy = wrong.sent_bytes, 0
    open_on_hosts(remote, tmp_path, 1)
    (data,) = tmp_path.glob("built/snapshots/*/data.parquet")
    assert before < wrong.sent_bytes < data.stat().st_size, "nothing was brought twice"


def test_a_store_that_answers_too_slowly_is_named(
    remote: TrainingJob, wrong: WrongStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.kernel.location.RETRIES", 0)
    monkeypatch.setattr("tasks.kernel.location.SILENCE_LIMIT_S", 0.5)
    wrong.delay_s = 1.5
    with pytest.raises(TransientError, match=r"objects/.*the store does not answer"):
        open_on_hosts(remote, tmp_path, 1)


@pytest.mark.slow
def test_a_model_that_is_trained_from_the_location_has_the_digest_of_one_trained_locally(
    s3: str, bucket: str, tmp_path: Path
) -> None:
    built, elsewhere = (ArtifactStore(tmp_path / n, Location.of(bucket)) for n in ("a", "b"))
    request = TrainingRequest(dataset(built, frame(runs.NUM_ROWS)), splits(), runs.CONFIG)
    remote = launch_training(request, elsewhere, tmp_path / "work")
    assert "MB of the snapshot" in elsewhere.path(remote.log).read_text()
    assert list(elsewhere.root.glob("snapshots/*/data.parquet")) == []
    data = request.dataset.snapshot.data
    assert digest_of(elsewhere.path(data)) == data.sha256, "what reads all of it completes it"
    local = runs.train(tmp_path / "local")
    assert (remote.program.sha256, remote.checkpoint.sha256) == (
        local.program.sha256,
        local.checkpoint.sha256,
    )
    assert list((tmp_path / "work").glob("*/s3-access.json")) == []
