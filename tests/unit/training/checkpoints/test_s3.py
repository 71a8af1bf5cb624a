"""Checkpoints on S3, against a real HTTP server that speaks its protocol, and keys for it."""

import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from pyarrow.fs import FileSelector, S3FileSystem
from pydantic import ValidationError

from tasks.kernel.errors import ConfigurationError, StorageError, TransientError
from tasks.kernel.location import Location, s3_access
from tasks.training.checkpoints.store import MANIFEST_NAME, STATE_NAME, CheckpointStore, open_store
from tasks.training.checkpoints.writer import CheckpointWriter
from tasks.training.config import CheckpointConfig, TrainingConfig
from tasks.training.core.run_directory import ACCESS_FILE, RunDirectory
from tests.support.services.servers import s3_server
from tests.support.state import make_bucket
from tests.support.training.checkpoint_writer import KEY, store_at
from tests.support.training.reading_ranks import training_job
from tests.support.training.states import assert_equal, state_after

SECRET = "marker-of-a-secret-77d1"
CONFIG = CheckpointConfig(uri="s3://lake/all-runs")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        make_bucket(endpoint, "lake")
        yield endpoint


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"lake/runs/{request.node.name}"


@pytest.fixture
def store(endpoint: str, prefix: str) -> CheckpointStore:
    return store_at([endpoint, prefix])


@pytest.fixture
def s3(endpoint: str) -> S3FileSystem:
    return S3FileSystem(endpoint_override=endpoint, access_key=KEY, secret_key=KEY)


def keys(s3: S3FileSystem, prefix: str) -> list[str]:
    found = s3.get_file_info(FileSelector(prefix, recursive=True, allow_not_found=True))
    return sorted(info.path.removeprefix(f"{prefix}/") for info in found if info.is_file)


def test_states_come_back_old_ones_are_pruned_and_a_finished_run_leaves_nothing(
    store: CheckpointStore, s3: S3FileSystem, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.kernel.location.WHOLE_UPLOAD_BYTES", 10_000_000)
    assert store.newest() is None
    large = {"w": torch.arange(6 << 20, dtype=torch.int32)}  # 24 MiB: many requests
    with CheckpointWriter(store, 60) as writer:
        for epoch, state in ((1, state_after(1)), (2, state_after(2)), (3, large)):
            writer.save(epoch, 0, state)
    manifests = [key for key in keys(s3, prefix) if key.endswith(MANIFEST_NAME)]
    assert [key[:11] for key in manifests] == ["state-00002", "state-00003"]
    assert_equal(store.load(store.newest()), large)
    store.clear()
    assert keys(s3, prefix) == []


@pytest.mark.parametrize("name", [MANIFEST_NAME, STATE_NAME])
def test_a_damaged_one_is_passed_over_and_what_a_killed_writer_left_goes(
    name: str, store: CheckpointStore, s3: S3FileSystem, prefix: str, endpoint: str
) -> None:
    whole, damaged = (store.save(epoch, 0, state_after(epoch)) for epoch in (1, 2))
    s3.delete_file(f"{prefix}/{damaged.name}/{name}")
    fresh = store_at([endpoint, prefix])
    assert fresh.newest() == whole
    fresh.prune(1)
    assert {key.partition("/")[0] for key in keys(s3, prefix)} == {whole.name}


def test_a_bucket_that_is_not_there_is_noticed_before_the_first_checkpoint(endpoint: str) -> None:
    missing = store_at([endpoint, "no-such-bucket/x"])
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/x.* there is no such bucket"):
        missing.newest()
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/x/.* there is no such bucket"):
        missing.save(1, 0, state_after(1))


def test_a_server_that_dies_costs_the_checkpoint_that_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tasks.kernel.location.RETRIES", 1)
    with s3_server() as endpoint:
        make_bucket(endpoint, "lake")
        store = store_at([endpoint, "lake/run"])
        port = int(endpoint.rpartition(":")[2])
        for child in psutil.Process().children(recursive=True):
            if any(c.laddr and c.laddr.port == port for c in child.net_connections()):
                child.kill()
                child.wait()
        writer = CheckpointWriter(store, 60, asynchronous=True)
        writer.save(1, 0, state_after(1))
        with pytest.raises(TransientError, match=r"s3://lake/run/.* does not answer"):
            writer.close()


def test_a_run_finds_its_store_by_a_file_that_is_the_owners_alone_and_gone_in_the_end(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }
    job, run = (
        training_job(config=TrainingConfig(checkpoints=CONFIG)),
        RunDirectory(tmp_path / "run-a"),
    )
    run.make()
    file = run.path / ACCESS_FILE
    file.symlink_to(tmp_path / "elsewhere")  # as somebody may who wants the keys
    with run.access_handed_over(job, driver):
        assert stat.S_IMODE(file.lstat().st_mode) == 0o600
        store = open_store(CONFIG, run.path, run.location)
    assert not (tmp_path / "elsewhere").exists()
    ref = store.save(1, 0, state_after(1))
    assert str(store) == "s3://lake/all-runs/run-a"
    with monkeypatch.context() as patch:
        for name, value in driver.items():
            patch.setenv(name, value)
        assert open_store(CONFIG, run.path).newest() == ref
    with pytest.raises(ConfigurationError, match="is not there; expected the address"):
        open_store(CONFIG, run.path, run.location)
    with pytest.raises(KeyError), run.access_handed_over(job, driver):
        raise KeyError
    file.write_text("{}")  # what a killed driver left
    with run.access_handed_over(training_job(), driver):
        assert list(run.path.iterdir()) == []


def test_without_keys_the_machines_own_role_is_asked_and_half_a_key_is_refused() -> None:
    assert s3_access({}) == {}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        with pytest.raises(ConfigurationError, match="the other is not") as caught:
            s3_access({name: SECRET})
        assert SECRET not in str(caught.value)


def test_no_secret_is_ever_printed(tmp_path: Path) -> None:
    keys = s3_access({"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": SECRET})
    assert SECRET not in f"{Location('s3://lake', keys)!r} {Location('s3://lake', keys)}"
    (tmp_path / ACCESS_FILE).write_text(f'{{"secret_access_key": "{SECRET}", "more": "{SECRET}"}}')
    with pytest.raises(
        ConfigurationError, match="is something else; expected the address"
    ) as caught:
        RunDirectory(tmp_path).location("s3://lake")
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "uri",
    [
        "/data/checkpoints",
        "file://host/data",
        "file:///",
        "file:///data/../etc",
        "gs://bucket/x",
        "s3:///x",
        "s3://Bucket_/x",
        "s3://bucket/../other",
        "s3://bucket/x?endpoint=evil",
        "s3://bucket/x#y",
        "s3://key:hunter2@bucket/x",
    ],
)
def test_another_uri_is_refused_without_showing_a_password(uri: str) -> None:
    with pytest.raises(ValidationError, match="is no location for checkpoints") as caught:
        CheckpointConfig(uri=uri)
    assert "hunter2" not in caught.value.errors()[0]["msg"]
