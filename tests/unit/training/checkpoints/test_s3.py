"""Checkpoints on S3, against a real HTTP server that speaks its protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from pyarrow.fs import FileSelector, S3FileSystem
from pydantic import SecretStr

from tasks.kernel.errors import ConfigurationError, StorageError, TransientError
from tasks.training.checkpoints import places as s3_place
from tasks.training.checkpoints.access import S3Access, access_handed_over
from tasks.training.checkpoints.config import CheckpointConfig
from tasks.training.checkpoints.manifest import MANIFEST_NAME, CheckpointRef
from tasks.training.checkpoints.places import S3Place
from tasks.training.checkpoints.store import CheckpointStore, open_store
from tasks.training.checkpoints.writer import CheckpointWriter
from tests.support.services.servers import s3_server
from tests.support.training.states import SHARD_BYTES, assert_equal, state_after

KEY = "test"


def access(endpoint: str) -> S3Access:
    return S3Access(
        endpoint=endpoint, region="us-east-1", access_key_id=KEY, secret_access_key=SecretStr(KEY)
    )


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
    return CheckpointStore(S3Place(prefix, access(endpoint)), SHARD_BYTES)


@pytest.fixture
def s3(endpoint: str) -> S3FileSystem:
    return client(endpoint)


def keys(s3: S3FileSystem, prefix: str) -> list[str]:
    found = s3.get_file_info(FileSelector(prefix, recursive=True, allow_not_found=True))
    return sorted(info.path.removeprefix(f"{prefix}/") for info in found if info.is_file)


def test_a_state_comes_back_as_it_was(store: CheckpointStore) -> None:
    assert store.newest() is None
    ref = store.save(3, 0, state_after(3))
    assert store.newest() == ref
    assert_equal(store.load(ref), state_after(3))
    assert_equal(store.load(ref, ["network"])["network"], state_after(3)["network"])


def test_a_part_larger_than_one_request_comes_back(endpoint: str, prefix: str) -> None:
    store = CheckpointStore(S3Place(prefix, access(endpoint)), 20 << 20)
    state = {"w": torch.arange(6 << 20, dtype=torch.int32)}  # 24 MiB: two parts, many requests
    assert_equal(store.load(store.save(1, 0, state)), state)


def test_old_ones_are_pruned_and_a_finished_run_leaves_nothing(
    store: CheckpointStore, s3: S3FileSystem, prefix: str
) -> None:
    with CheckpointWriter(store, 60) as writer:
        for epoch in (1, 2, 3):
            writer.save(epoch, 0, state_after(epoch))
    manifests = [key for key in keys(s3, prefix) if key.endswith(MANIFEST_NAME)]
    assert [key[:11] for key in manifests] == ["state-00002", "state-00003"]
    store.clear()
    assert keys(s3, prefix) == []


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "no manifest"])
def test_a_damaged_one_is_passed_over_in_a_sentence(
    damage: str,
    store: CheckpointStore,
    s3: S3FileSystem,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = store.save(1, 0, state_after(1))
    damaged = store.save(2, 0, state_after(2))
    name = MANIFEST_NAME if damage == "no manifest" else "part-00000-00001.safetensors"
    path = f"{prefix}/{damaged.name}/{name}"
    content = bytearray(s3.open_input_stream(path).read())
    content[-1] ^= 1
    if damage in {"missing", "no manifest"}:
        s3.delete_file(path)
    else:
        with s3.open_output_stream(path) as stream:
            stream.write(bytes(content[: -1 if damage == "truncated" else None]))
    assert store.newest() == whole
    assert damaged.name in caplog.text
    assert "passed over" in caplog.text or "is incomplete or damaged" in caplog.text


def test_what_a_killed_writer_left_goes_with_the_next(
    store: CheckpointStore, s3: S3FileSystem, prefix: str
) -> None:
    whole = store.save(1, 0, state_after(1))
    left = CheckpointRef.new(2, 0).name
    with s3.open_output_stream(f"{prefix}/{left}/part-00000-00000.safetensors") as stream:
        stream.write(b"half")
    assert store.newest() == whole
    store.prune(2)
    assert not [key for key in keys(s3, prefix) if key.startswith(left)]
    assert store.newest() == whole


def test_a_bucket_that_is_not_there_is_a_sentence(endpoint: str) -> None:
    store = CheckpointStore(S3Place("no-such-bucket/x", access(endpoint)), SHARD_BYTES)
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/x/.* the store refused .*BUCKET"):
        store.save(1, 0, state_after(1))


def process_that_listens(endpoint: str) -> psutil.Process:
    port = int(endpoint.rpartition(":")[2])
    for child in psutil.Process().children():
        if any(c.laddr and c.laddr.port == port for c in child.net_connections()):
            return child
    raise AssertionError(f"no child listens on {port}")


def test_a_server_that_dies_within_an_upload_leaves_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3_place, "S3_ATTEMPTS", 2)
    with s3_server() as endpoint:
        client(endpoint).create_dir("lake")
        place = S3Place("lake/run", access(endpoint))
        server = process_that_listens(endpoint)

        def chunks() -> Iterator[memoryview]:
            yield memoryview(bytes(11 << 20))  # more than one request's worth
            server.kill()
            server.wait()
            yield memoryview(bytes(11 << 20))

        with pytest.raises(TransientError, match=r"the store does not answer .*NETWORK_CONNECTION"):
            place.write("state/part", chunks())
        writer = CheckpointWriter(CheckpointStore(place, SHARD_BYTES), 60, asynchronous=True)
        writer.save(1, 0, state_after(1))
        with pytest.raises(TransientError, match="a new attempt goes on from the newest whole one"):
            writer.close()


def test_an_upload_that_fails_on_our_side_never_counts(
    endpoint: str, store: CheckpointStore, s3: S3FileSystem, prefix: str
) -> None:
    whole = store.save(1, 0, state_after(1))
    ref = CheckpointRef.new(2, 0)

    def chunks() -> Iterator[memoryview]:
        yield memoryview(b"some")
        raise KeyError("broken")

    with pytest.raises(KeyError):
        S3Place(prefix, access(endpoint)).write(
            f"{ref.name}/part-00000-00000.safetensors", chunks()
        )
    assert store.newest() == whole


def test_a_run_finds_its_store_by_the_file_that_the_driver_wrote(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    config = CheckpointConfig(uri="s3://lake/all-runs")
    driver = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": KEY,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }
    run = tmp_path / "run-a"
    run.mkdir()
    with access_handed_over(config, run, driver):
        store = open_store(config, run)
    ref = store.save(1, 0, state_after(1))
    assert str(store) == "s3://lake/all-runs/run-a"
    assert open_store(config, run, driver).newest() == ref
    with pytest.raises(ConfigurationError, match="which the driver writes for its ranks"):
        open_store(config, run)


def test_a_bucket_that_is_not_there_is_noticed_before_the_first_checkpoint(endpoint: str) -> None:
    store = CheckpointStore(S3Place("no-such-bucket/x", access(endpoint)), SHARD_BYTES)
    with pytest.raises(StorageError, match="there is no bucket no-such-bucket"):
        store.newest()
