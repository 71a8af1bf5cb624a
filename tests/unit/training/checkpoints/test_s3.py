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
from tasks.training.checkpoints import location
from tasks.training.checkpoints.location import (
    FILE_NAME,
    S3Access,
    S3Location,
    access_handed_over,
    read_access,
)
from tasks.training.checkpoints.store import MANIFEST_NAME, STATE_NAME, CheckpointStore, open_store
from tasks.training.checkpoints.writer import CheckpointWriter
from tasks.training.config import CheckpointConfig
from tests.support.services.servers import s3_server
from tests.support.training.checkpoint_writer import KEY, access, store_at
from tests.support.training.states import assert_equal, state_after

SECRET = "marker-of-a-secret-77d1"
CONFIG = CheckpointConfig(uri="s3://lake/all-runs")


def client(endpoint: str) -> S3FileSystem:
    return S3FileSystem(**access(endpoint).arguments(), allow_bucket_creation=True)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        client(endpoint).create_dir("lake")
        yield endpoint


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"lake/runs/{request.node.name}"


@pytest.fixture
def store(endpoint: str, prefix: str) -> CheckpointStore:
    return store_at([endpoint, prefix])


@pytest.fixture
def s3(endpoint: str) -> S3FileSystem:
    return client(endpoint)


def keys(s3: S3FileSystem, prefix: str) -> list[str]:
    found = s3.get_file_info(FileSelector(prefix, recursive=True, allow_not_found=True))
    return sorted(info.path.removeprefix(f"{prefix}/") for info in found if info.is_file)


def test_states_come_back_old_ones_are_pruned_and_a_finished_run_leaves_nothing(
    store: CheckpointStore, s3: S3FileSystem, prefix: str
) -> None:
    assert store.newest() is None
    large = {"w": torch.arange(6 << 20, dtype=torch.int32)}  # 24 MiB: many requests
    with CheckpointWriter(store, 60) as writer:
        for epoch, state in ((1, state_after(1)), (2, state_after(2)), (3, large)):
            writer.save(epoch, 0, state)
    manifests = [key for key in keys(s3, prefix) if key.endswith(MANIFEST_NAME)]
    assert [key[:11] for key in manifests] == ["state-00002", "state-00003"]
    newest = store.newest()
    assert_equal(store.load(newest), large)
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
    with pytest.raises(StorageError, match="there is no bucket no-such-bucket"):
        missing.newest()
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/x/.* the store refused .*BUCKET"):
        missing.save(1, 0, state_after(1))


def test_a_server_that_dies_costs_the_checkpoint_that_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(location, "S3_ATTEMPTS", 2)
    with s3_server() as endpoint:
        client(endpoint).create_dir("lake")
        store = CheckpointStore(S3Location("lake/run", access(endpoint)))
        port = int(endpoint.rpartition(":")[2])
        for child in psutil.Process().children(recursive=True):
            if any(c.laddr and c.laddr.port == port for c in child.net_connections()):
                child.kill()
                child.wait()
        writer = CheckpointWriter(store, 60, asynchronous=True)
        writer.save(1, 0, state_after(1))
        with pytest.raises(TransientError, match="a new attempt resumes from the newest complete"):
            writer.close()


def test_a_run_finds_its_store_by_a_file_that_is_the_owners_alone_and_gone_in_the_end(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    driver = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }
    run = tmp_path / "run-a"
    run.mkdir()
    (run / FILE_NAME).symlink_to(tmp_path / "elsewhere")  # as somebody may who wants the keys
    with access_handed_over(CONFIG, run, driver):
        assert stat.S_IMODE((run / FILE_NAME).lstat().st_mode) == 0o600
        store = open_store(CONFIG, run)
    assert not (tmp_path / "elsewhere").exists()
    ref = store.save(1, 0, state_after(1))
    assert str(store) == "s3://lake/all-runs/run-a"
    assert open_store(CONFIG, run, driver).newest() == ref
    with pytest.raises(ConfigurationError, match="which the driver writes for its ranks"):
        open_store(CONFIG, run)
    with pytest.raises(KeyError), access_handed_over(CONFIG, run, driver):
        raise KeyError
    (run / FILE_NAME).write_text("{}")  # what a killed driver left
    with access_handed_over(CheckpointConfig(), run, driver):
        assert list(run.iterdir()) == []


def test_without_keys_the_machines_own_chain_is_asked_and_half_a_key_is_refused() -> None:
    assert S3Access.of_driver({}).arguments() == {}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        with pytest.raises(ConfigurationError, match="the other is not") as caught:
            S3Access.of_driver({name: SECRET})
        assert SECRET not in str(caught.value)


def test_no_secret_is_ever_printed(tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": SECRET}
    assert SECRET not in repr(S3Access.of_driver(keys))
    (tmp_path / FILE_NAME).write_text(f'{{"secret_key": "{SECRET}", "unknown": "{SECRET}"}}')
    with pytest.raises(ConfigurationError, match="start the run again") as caught:
        read_access(tmp_path)
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
