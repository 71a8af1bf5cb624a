"""Materialization by the vectorised engine against Feast's own, and against Redis itself.

One table of keys and 32-bit floats is written in turn by each, in one run, so that ratios hold
whatever else the machine does. Feast's own writes are its local engine with the stores `redis` and
`sqlite`, the engine's go to this project's stores; raw is a pipelined HSET of the same bytes, made
beforehand.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from feast import Entity, FeatureView, Field, FileSource, ValueType
from feast.types import Float32
from google.protobuf.timestamp_pb2 import Timestamp
from redis import Redis

from infra.bench.figures import Measured, at_least, at_most, seconds
from infra.bench.parts import Bench, feast_store
from infra.bench.processes import redis_server
from tasks.features.access.store import quiet

ENGINE = "tasks.features.online.vector_engine.VectorComputeEngine"
REDIS = "tasks.features.online.redis_store.NewerWinsRedisOnlineStore"
SQLITE = "tasks.features.online.sqlite_store.NewerWinsSqliteOnlineStore"
START = datetime(2013, 1, 1, tzinfo=UTC)
NUM_FEATURES = 10
PIPELINE_ROWS = 1_000
VIEW = "measured"
TIME_FIELD = f"_ts:{VIEW}".encode()


def figures(bench: Bench) -> Measured:
    """Rows a second beside Feast's own engine, and what differs from what that writes."""
    num_keys, folder = bench.size(336_776, 2_000), bench.folder
    _write_table(folder, num_keys)
    with redis_server(folder) as server, server.connect() as client:
        return _compare(folder, server.connection_string, client, num_keys)


def _compare(folder: Path, address: str, client: Redis, num_keys: int) -> Measured:
    redis = {"type": "redis", "connection_string": address}
    feast_redis = num_keys / _materialized(folder / "f_r", redis, "local")
    theirs = _hashes(client)
    client.flushall()
    ours_redis = num_keys / _materialized(folder / "v_r", {**redis, "type": REDIS}, ENGINE)
    ours = _hashes(client)
    client.flushall()
    commands = [["HSET", key, *(part for pair in h.items() for part in pair)] for key, h in ours]
    raw = num_keys / seconds(lambda: _piped(client, commands))
    feast_db, our_db = folder / "feast.db", folder / "ours.db"
    kinds = {"sqlite": feast_db, SQLITE: our_db}
    plain, newer = ({"type": kind, "path": str(file)} for kind, file in kinds.items())
    feast_sqlite = num_keys / _materialized(folder / "f_s", plain, "local")
    ours_sqlite = num_keys / _materialized(folder / "v_s", newer, ENGINE)
    differing = len({_frozen(h) for h in theirs} ^ {_frozen(h) for h in ours})
    differing += len(_rows(feast_db) ^ _rows(our_db))
    faster, beside_raw = ours_redis / feast_redis, ours_redis / raw
    to_redis = f"{ours_redis:,.0f} to {feast_redis:,.0f}, newer wins"
    to_sqlite = f"{ours_sqlite:,.0f} to {feast_sqlite:,.0f}"
    on_sqlite, pipeline = ours_sqlite / feast_sqlite, f"raw pipeline {raw:,.0f}"
    return [
        at_least("rows/s to Redis, engine to Feast's own", faster, 8, to_redis),
        at_least("rows/s to Redis, engine to raw HSET", beside_raw, 0.5, pipeline),
        at_least("rows/s to SQLite, engine to Feast's own", on_sqlite, 3, to_sqlite),
        at_most("stored bytes that differ from Feast's", differing, 0, f"{num_keys:,} entities"),
    ]


def _write_table(folder: Path, num_keys: int) -> None:
    """One row a key, in random order, over one day of event times."""
    random = np.random.default_rng(0)
    moments = np.datetime64(START.replace(tzinfo=None), "us") + random.integers(
        0, 86_400 * 10**6, num_keys
    )
    columns = {f"f{i}": random.random(num_keys, dtype=np.float32) for i in range(NUM_FEATURES)}
    keys, times = random.permutation(num_keys), pa.array(moments, pa.timestamp("us", "UTC"))
    table = pa.table({"key": keys.astype(np.int64), **columns, "event_timestamp": times})
    (folder / "tables" / VIEW).mkdir(parents=True)
    pq.write_table(table, folder / "tables" / VIEW / "rows.parquet")


def _materialized(folder: Path, online: dict[str, str], engine: str) -> float:
    """Seconds that materialization of the table takes; applying the definitions is not in it."""
    folder.mkdir()
    store = feast_store(
        folder / "registry.db",
        offline_store={
            "type": "tasks.features.offline.store.AsofDuckDBOfflineStore",
            "tables_path": str(folder.parent / "tables"),
            "spill_path": str(folder / "spill"),
        },
        online_store=online,
        batch_engine={"type": engine},
        materialization={"pull_latest_features": True, "online_write_batch_size": 10_000},
    )
    entity = Entity(name="key", join_keys=["key"], value_type=ValueType.INT64)
    view = FeatureView(
        name=VIEW,
        entities=[entity],
        ttl=timedelta(days=1),
        schema=[Field(name=f"f{i}", dtype=Float32) for i in range(NUM_FEATURES)],
        source=FileSource(name="rows", path=VIEW, timestamp_field="event_timestamp"),
    )
    with quiet():
        store.apply([entity, view])
        return seconds(lambda: store.materialize(START, START + timedelta(days=1)))


def _piped(client: Redis, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Answers to commands that are sent by the thousand."""
    answers: list[Any] = []
    for start in range(0, len(commands), PIPELINE_ROWS):
        with client.pipeline(transaction=False) as pipe:
            for words in commands[start : start + PIPELINE_ROWS]:
                pipe.execute_command(*words)  # type: ignore[no-untyped-call]
            answers += pipe.execute()
    return answers


def _hashes(client: Redis) -> list[tuple[bytes, dict[bytes, bytes]]]:
    keys = list(client.scan_iter(count=10_000))
    return list(zip(keys, _piped(client, [("HGETALL", key) for key in keys]), strict=True))


def _frozen(entry: tuple[bytes, dict[bytes, bytes]]) -> tuple[bytes, frozenset[Any]]:
    """A hash as Feast reads it: behind the event time stands more, which is ours."""
    key, fields = entry
    moment = Timestamp.FromString(fields[TIME_FIELD])
    plain = Timestamp(seconds=moment.seconds, nanos=moment.nanos).SerializeToString()
    return key, frozenset({**fields, TIME_FIELD: plain}.items())


def _rows(file: Path) -> set[tuple[object, ...]]:
    columns = "entity_key, feature_name, value, event_ts, created_ts"
    with closing(sqlite3.connect(file)) as connection:
        return set(connection.execute(f"SELECT {columns} FROM bench_{VIEW}"))
