"""The vectorised engine on real Redis and SQLite: byte for byte what Feast writes, newer wins."""

import logging
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
from feast import Entity, FeatureStore, FeatureView, Field, RepoConfig
from feast.infra.online_stores.helpers import _mmh3
from feast.infra.online_stores.redis import RedisOnlineStore
from feast.infra.online_stores.sqlite import SqliteOnlineStore
from feast.types import Float32
from feast.value_type import ValueType
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tasks.features.online.encoding import encode_entity_keys
from tasks.features.online.newer_wins import Removal
from tasks.features.online.redis_store import NewerWinsRedisOnlineStore
from tasks.features.online.sqlite_store import NewerWinsSqliteOnlineStore
from tasks.kernel.errors import FeatureStoreError, TransientError
from tests.support.data import feature_views as views
from tests.support.host.processes import wait_until
from tests.support.services.servers import RedisServer, redis_server

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:feast"),
    pytest.mark.filterwarnings("ignore:Discarding nonzero nanoseconds:UserWarning"),
]

ENGINE = "tasks.features.online.vector_engine.VectorComputeEngine"
KEY_TYPES = {"name": ValueType.STRING, "number": ValueType.INT64}
ANY_TYPE = st.lists(st.sampled_from(sorted(views.COLUMNS)), unique=True, min_size=1, max_size=8)
ANY_KEYS = st.lists(st.sampled_from(sorted(views.KEYS)), unique=True, min_size=1, max_size=2)
DRILL = settings(suppress_health_check=list(HealthCheck))
Hashes = dict[bytes, dict[bytes, bytes]]


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with server.connect() as connected:
        connected.flushall()
        yield connected


def redis_online(server: RedisServer, database: int = 0) -> dict[str, Any]:
    return views.online_store("redis", f"{server.connection_string},db={database}")


def hashes(client: redis.Redis) -> Hashes:
    """All of the server, times as Feast reads them: what is behind them is ours."""
    found: Hashes = {key: client.hgetall(key) for key in client.scan_iter(count=1000)}
    for fields in found.values():
        for name in fields:
            if name.startswith(b"_ts:"):
                read = Timestamp.FromString(fields[name])
                fields[name] = Timestamp(seconds=read.seconds, nanos=read.nanos).SerializeToString()
    return found


def write_to_redis(config: RepoConfig, view: FeatureView, *batches: pa.RecordBatch) -> int:
    store = NewerWinsRedisOnlineStore()
    written = store.write_rows(config, view, (views.encoded(view, batch) for batch in batches))
    store._get_client(config.online_store).close()
    return written


@dataclass
class Stores:
    """Our store and Feast's, of Redis or SQLite, each in a place of its own."""

    kind: str
    folder: Path
    server: RedisServer
    opened: list[Any] = field(default_factory=list)

    def empty(self) -> None:
        for store in self.opened:
            if self.kind == "sqlite":
                store._conn.close()
        self.opened.clear()
        if self.kind == "redis":
            with self.server.connect() as client:
                client.flushall()
        for file in self.folder.glob("*.db*"):
            file.unlink()

    def make(self, number: int, view: FeatureView, *, ours: bool = True) -> tuple[Any, RepoConfig]:
        if self.kind == "redis":
            store = NewerWinsRedisOnlineStore() if ours else RedisOnlineStore()
            return store, views.repo_config(self.folder, redis_online(self.server, number))
        store = NewerWinsSqliteOnlineStore() if ours else SqliteOnlineStore()
        online = views.online_store("sqlite", str(self.folder / f"{number}.db"))
        config = views.repo_config(self.folder, online if ours else {**online, "type": "sqlite"})
        store.update(config, [], [view], [], [], False)
        self.opened.append(store)
        return store, config

    def contents(self, config: RepoConfig) -> Any:
        """All that is stored, as Feast keeps it."""
        if self.kind == "sqlite":
            return sqlite_rows(config)
        number = int(config.online_store.connection_string.rsplit("=", 1)[1])
        with redis.Redis(port=self.server.port, db=number) as client:
            return hashes(client)

    def cells(self, config: RepoConfig, view: FeatureView) -> dict[tuple[bytes, str], bytes]:
        found = self.contents(config)
        if self.kind == "sqlite":
            return {(row[0], row[1]): row[2] for row in found}
        fields = {feature.name: _mmh3(f"v:{feature.name}") for feature in view.features}
        return {
            (key[: -len(views.PROJECT)], name): values[stored]
            for key, values in found.items()
            for name, stored in fields.items()
        }


@pytest.fixture(params=["redis", "sqlite"])
def stores(request: pytest.FixtureRequest, server: RedisServer, tmp_path: Path) -> Iterator[Stores]:
    made = Stores(request.param, tmp_path, server)
    yield made
    made.empty()


@DRILL
@given(
    seed=st.integers(0, 10**6),
    keys=ANY_KEYS,
    features=ANY_TYPE,
    created=st.booleans(),
    unit=st.sampled_from(["s", "ms", "us", "ns"]),
    zone=st.sampled_from([None, "UTC", "America/New_York"]),
)
def test_what_is_stored_equals_what_feast_stores_and_feast_reads_it(
    stores: Stores,
    seed: int,
    keys: list[str],
    features: list[str],
    created: bool,
    unit: str,
    zone: str | None,
) -> None:
    stores.empty()
    view = views.make_view(keys, features, created=created)
    batch = first_of_each(views.make_rows(seed, keys, features, 12, unit, zone), view)
    assume(not feast_loses_bytes(batch))
    rows = views.feasts_rows(view, batch)
    stock, stock_config = stores.make(0, view, ours=False)
    ours, config = stores.make(1, view)
    stock.online_write_batch(stock_config, view, rows, None)
    assert ours.write_rows(config, view, [views.encoded(view, batch)]) == len(batch)
    assert stores.contents(config) == stores.contents(stock_config)
    asked = [key for key, *_ in rows]
    reader, read_config = stores.make(1, view, ours=False)
    assert reader.online_read(read_config, view, asked) == stock.online_read(
        stock_config, view, asked
    )


@DRILL
@given(
    seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
    keys=ANY_KEYS,
    features=ANY_TYPE,
    created=st.booleans(),
)
def test_the_newer_row_stays_whatever_the_order(
    stores: Stores, seeds: list[int], keys: list[str], features: list[str], created: bool
) -> None:
    """Rows a microsecond apart, written as columns or pushed; of equal ones the last stays."""
    stores.empty()
    view = views.make_view(keys, features, created=created)
    batches = [views.make_rows(seed, keys, features, 12, "us", "UTC") for seed in seeds]
    columns, columns_config = stores.make(0, view)
    pushed, pushed_config = stores.make(1, view)
    for batch in batches:
        columns.write_rows(columns_config, view, [views.encoded(view, batch)])
        pushed.online_write_batch(pushed_config, view, views.feasts_rows(view, batch), None)
    assert stores.contents(columns_config) == stores.contents(pushed_config)
    assert stores.cells(columns_config, view) == cells_that_stay(view, batches)


def cells_that_stay(
    view: FeatureView, batches: list[pa.RecordBatch]
) -> dict[tuple[bytes, str], bytes]:
    """Oracle: the newer event time, then the later `created`, then the row that came last."""
    names = [feature.name for feature in view.features]
    newest: dict[bytes, tuple[tuple[int, int], list[bytes]]] = {}
    for batch in batches:
        rows = views.encoded(view, batch)
        second = [0] * len(rows) if rows.created_us is None else rows.created_us.tolist()
        moments = zip(rows.events_us.tolist(), second, strict=True)
        cells = zip(*(rows.features[name].cells.to_pylist() for name in names), strict=True)
        for key, moment, values in zip(rows.keys.to_pylist(), moments, cells, strict=True):
            if key not in newest or moment >= newest[key][0]:
                newest[key] = (moment, list(values))
    return {
        (key, name): value
        for key, (_, values) in newest.items()
        for name, value in zip(names, values, strict=True)
    }


def test_before_1970_the_newer_value_wins_too(
    server: RedisServer, client: redis.Redis, tmp_path: Path
) -> None:
    """Feast itself takes any stored moment of before 1970 for none at all."""
    config = views.repo_config(tmp_path, redis_online(server))
    view = views.make_view(["number"], ["int32"], created=False)
    moments = [-(10**15), -1, -(10**6), 0, -5 * 10**14]
    for number, moment in enumerate(moments):
        write_to_redis(config, view, one_row(number, moment))
    (found,) = hashes(client).values()
    assert found[b"_ts:v"] == b""  # the epoch itself, written fourth
    expected = views.encoded(view, one_row(3, 0)).features["int32"].cells.to_pylist()[0]
    assert expected in found.values()


def one_row(value: int, moment_us: int) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "number": pa.array([7], pa.int64()),
            "int32": pa.array([value], pa.int32()),
            "event": pa.array([moment_us], pa.timestamp("us", "UTC")),
        }
    )


def test_a_view_of_thousands_of_features_is_written_whole(
    server: RedisServer, client: redis.Redis, tmp_path: Path
) -> None:
    view = views.make_view(["number"], ["int32"], created=False)
    names = [f"f{i}" for i in range(5000)]
    view.features = [Field(name=name, dtype=Float32) for name in names]
    columns: dict[str, pa.Array] = {name: pa.array([1.0], pa.float32()) for name in names}
    row = one_row(1, 10)
    batch = pa.record_batch({"number": row["number"], "event": row["event"], **columns})
    write_to_redis(views.repo_config(tmp_path, redis_online(server)), view, batch)
    (found,) = hashes(client).values()
    assert len(found) == 5001


@pytest.mark.slow
def test_a_lost_server_and_a_foreign_key_get_a_sentence(
    server: RedisServer, client: redis.Redis, tmp_path: Path
) -> None:
    view = views.make_view(["number"], ["int32"], created=False)
    config = views.repo_config(tmp_path, redis_online(server))
    write_to_redis(config, view, one_row(1, 10))
    (key,) = hashes(client)
    client.delete(key)
    client.set(key, "not a hash")
    with pytest.raises(FeatureStoreError, match=r"Redis refused to write.*WRONGTYPE"):
        write_to_redis(config, view, one_row(1, 10))
    gone = views.repo_config(tmp_path, views.online_store("redis", "127.0.0.1:1,socket_timeout=5"))
    with pytest.raises(TransientError, match=r"Redis did not take all values.*refused"):
        write_to_redis(gone, view, one_row(1, 10))


@pytest.mark.slow
def test_a_cluster_gets_every_entity_on_its_own_node(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with (
        redis_server(folders[0], "--cluster-enabled", "yes") as one,
        redis_server(folders[1], "--cluster-enabled", "yes") as two,
    ):
        join_cluster(one, two)
        online = views.online_store("redis", one.connection_string)
        config = views.repo_config(tmp_path, {**online, "redis_type": "redis_cluster"})
        view = views.make_view(["name", "number"], ["text", "json"], created=False)
        rows = views.make_rows(1, ["name", "number"], ["text", "json"], 60, "us", None)
        batch = first_of_each(rows, view)
        written = write_to_redis(config, view, batch)
        with one.connect() as first, two.connect() as second:
            ours = [hashes(first), hashes(second)]
        assert written == len(batch) == len(ours[0]) + len(ours[1])
        assert min(map(len, ours)) > 0
        store = NewerWinsRedisOnlineStore()
        one = Removal(keys=[views.encoded(view, batch).keys[0].as_py()])
        assert store.remove_values(config, view, one) == 1
        assert store.remove_values(config, view) == len(batch) - 1
        store._get_client(config.online_store).close()


def join_cluster(one: RedisServer, two: RedisServer) -> None:
    with one.connect() as first, two.connect() as second:
        first.execute_command("CLUSTER ADDSLOTS", *range(8192))
        second.execute_command("CLUSTER ADDSLOTS", *range(8192, 16384))
        second.execute_command("CLUSTER SET-CONFIG-EPOCH", 2)
        first.execute_command("CLUSTER MEET", "127.0.0.1", two.port)
        for node in (first, second):
            wait_until(
                lambda n=node: (
                    n.execute_command("CLUSTER INFO")["cluster_state"] == "ok"
                    and len(n.execute_command("CLUSTER SLOTS")) == 2
                ),
                "the two nodes form a cluster",
            )


def sqlite_rows(config: RepoConfig) -> list[tuple[object, ...]]:
    """Feast's columns, as they are in the file."""
    with sqlite3.connect(config.online_store.path) as connection:
        rows = connection.execute(
            "SELECT entity_key, feature_name, value, vector_value, event_ts, "
            f"created_ts FROM {views.PROJECT}_v ORDER BY 1, 2"
        ).fetchall()
    connection.close()
    return rows


def feast_loses_bytes(batch: pa.RecordBatch) -> bool:
    """True where Feast writes empty bytes as nulls: in a batch that has no others in a column."""
    columns = (batch.column(i) for i, field in enumerate(batch.schema) if field.type == pa.binary())
    return any(set(column.to_pylist()) <= {None, b""} for column in columns)


def first_of_each(batch: pa.RecordBatch, view: FeatureView) -> pa.RecordBatch:
    """The first row of each entity: what the newest rows of a table look like."""
    types = {c.name: c.dtype.to_value_type() for c in view.entity_columns}
    _, first = np.unique(
        np.array([key.hex() for key in encode_entity_keys(batch, types).to_pylist()]),
        return_index=True,
    )
    return batch.take(pa.array(np.sort(first)))


# Through Feast


def materialized(folder: Path, online: dict[str, Any], engine: str, features: list[str]) -> Any:
    """The engine, after Feast wrote the table `v` through it."""
    store = FeatureStore(
        config=views.repo_config(
            folder,
            online,
            batch_engine={"type": engine},
            materialization={"pull_latest_features": True, "online_write_batch_size": 7},
        )
    )
    view = views.make_view(["name", "number"], features, created=True)
    store.apply(
        [*(Entity(name=k, join_keys=[k], value_type=t) for k, t in KEY_TYPES.items()), view]
    )
    store.materialize(views.NOON - timedelta(hours=1), views.NOON + timedelta(hours=1))
    return store._get_provider().batch_engine


def write_table(folder: Path, features: list[str]) -> None:
    (folder / "tables" / "v").mkdir(parents=True)
    rows = views.make_rows(5, list(KEY_TYPES), features, 60, "us", "UTC")
    pq.write_table(pa.Table.from_batches([rows]), folder / "tables" / "v" / "rows.parquet")


def test_feast_materializes_through_either_engine_to_the_same_hashes(
    server: RedisServer, client: redis.Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_table(tmp_path, sorted(views.COLUMNS))
    found = []
    ours = redis_online(server)
    for engine, online in (("local", {**ours, "type": "redis"}), (ENGINE, ours)):
        client.flushall()
        with caplog.at_level(logging.INFO, "tasks.features.online.vector_engine"):
            made = materialized(tmp_path, online, engine, sorted(views.COLUMNS))
        found.append(hashes(client))
    assert found[0] == found[1]
    write = made.writes["v"]
    assert write.num_rows == write.num_written == len(found[1])
    assert write.num_feast_cells == len(views.SLOW) * write.num_rows
    assert f"{write.num_feast_cells} cells of types without a layout" in caplog.text


def test_a_store_that_is_not_known_takes_feasts_way_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_table(tmp_path, ["int32"])
    online = {"type": "sqlite", "path": str(tmp_path / "stock.db")}
    write = materialized(tmp_path, online, ENGINE, ["int32"]).writes["v"]
    assert write.num_feast_rows == write.num_rows > 0
    assert write.reason == "the online store is a SqliteOnlineStore"
    assert "rows took Feast's slower way: the online store is a SqliteOnlineStore" in caplog.text
