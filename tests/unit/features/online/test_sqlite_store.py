"""The SQLite online store: the newer value stays, readers go on, refusals are sentences."""

import sqlite3
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from feast import RepoConfig
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.protos.feast.types.Value_pb2 import Value
from pydantic import ValidationError

from tasks.features.online import sqlite_store as online_store
from tasks.features.online.sqlite_store import (
    NewerWinsSqliteOnlineStore,
    NewerWinsSqliteOnlineStoreConfig,
)
from tasks.kernel.errors import FeatureStoreError, StorageError, TransientError
from tests.support.data.feature_views import NOON, make_view, repo_config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")

OURS = "tasks.features.online.sqlite_store.NewerWinsSqliteOnlineStore"
VIEW = make_view(["number"], ["int32", "text"], created=True)
KEY = EntityKey(join_keys=["number"], entity_values=[Value(int64_val=7)])
Pair = tuple[NewerWinsSqliteOnlineStore, RepoConfig]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Pair]:
    config = repo_config(tmp_path, {"type": OURS, "path": str(tmp_path / "online.db")})
    made = NewerWinsSqliteOnlineStore()
    made.update(config, [], [VIEW], [], [], False)
    yield made, config
    made._get_conn(config).close()


def push(pair: Pair, number: int, event: datetime, created: datetime | None = None) -> None:
    values = {"int32": Value(int32_val=number), "text": Value(string_val=str(number))}
    pair[0].online_write_batch(pair[1], VIEW, [(KEY, values, event, created)], None)


def read(pair: Pair) -> int | None:
    ((_, values),) = pair[0].online_read(pair[1], VIEW, [KEY])
    return None if values is None else int(values["int32"].int32_val)


def test_readers_of_the_same_process_see_nothing_before_the_commit(store: Pair) -> None:
    push(store, 1, NOON)
    with store[0]._writer(store[1]) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM tests_v")
        assert read(store) == 1
        connection.execute("COMMIT")
    assert read(store) is None


def test_readers_are_served_while_another_process_writes(store: Pair) -> None:
    push(store, 1, NOON)
    with sqlite3.connect(store[1].online_store.path) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert read(store) == 1
    other.close()


def test_a_writer_that_waits_too_long_may_try_again(
    store: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online_store, "LOCK_WAIT_S", 0.01)
    with sqlite3.connect(store[1].online_store.path) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(TransientError, match="in use by another process"):
            push(store, 1, NOON)
    other.close()
    push(store, 1, NOON)
    assert read(store) == 1


def test_a_view_without_a_table_is_told_to_be_applied(tmp_path: Path) -> None:
    config = repo_config(tmp_path, {"type": OURS, "path": str(tmp_path / "other.db")})
    empty = NewerWinsSqliteOnlineStore()
    with pytest.raises(FeatureStoreError, match="apply the feature definitions"):
        push((empty, config), 1, NOON)
    empty._get_conn(config).close()


def test_a_damaged_file_and_a_folder_that_is_none_get_a_sentence(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"no database" * 1000)
    folder = tmp_path / "folder.db"
    folder.mkdir()
    for path, kind, said in (
        (damaged, FeatureStoreError, f"remove {damaged} and refresh"),
        (folder, StorageError, "unable to open database file"),
    ):
        config = repo_config(tmp_path, {"type": OURS, "path": str(path)})
        broken = NewerWinsSqliteOnlineStore()
        for _ in range(2):  # a failed opening leaves nothing that looks open
            with pytest.raises(kind, match=said):
                broken.update(config, [], [VIEW], [], [], False)
            with pytest.raises(kind, match=said):
                push((broken, config), 1, NOON)
            with pytest.raises(kind, match=said):
                broken.count_entities(config, VIEW)
        if broken._conn:
            broken._conn.close()


@pytest.mark.parametrize(
    "option", ["vector_enabled", "text_search_enabled", "enable_openai_compatible_store"]
)
def test_vectors_and_texts_to_search_are_refused_at_the_door(option: str) -> None:
    with pytest.raises(ValidationError, match="keeps no vectors and no text index"):
        NewerWinsSqliteOnlineStoreConfig(path="x", **{option: True})
