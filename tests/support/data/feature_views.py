"""Feature views of every type with random rows, and Feast's own way to write them."""

import random
from datetime import UTC, datetime, timedelta
from math import inf, nan
from pathlib import Path
from typing import Any

import pyarrow as pa
from feast import Entity, FeatureView, Field, FileSource, RepoConfig, types
from feast.types import FeastType
from feast.utils import _convert_arrow_to_proto

from tasks.features.online.encoding import EncodedRows, encode_rows

PROJECT = "tests"
NOON = datetime(2013, 6, 1, 12, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)

Column = tuple[FeastType, pa.DataType, list[Any]]
COLUMNS: dict[str, Column] = {
    "int32": (types.Int32, pa.int32(), [0, 1, -1, 127, 128, 2**31 - 1, -(2**31)]),
    "int64": (types.Int64, pa.int64(), [0, 1, -1, 300, 2**53, -(2**53)]),
    "narrow": (types.Int64, pa.int16(), [0, 1, -1, 2**15 - 1]),
    "float32": (types.Float32, pa.float32(), [0.0, -0.0, 0.1, -1.5, 1e-30, inf, nan]),
    "wide": (types.Float32, pa.float64(), [0.0, 0.1, 1e300, -1e-300]),
    "float64": (types.Float64, pa.float64(), [0.0, 0.1, 1e300, 5e-324, -inf, nan]),
    "text": (types.String, pa.string(), ["", "a", "é" * 70, "x" * 200, "a\0b", "y" * 20_000]),
    "bytes": (types.Bytes, pa.binary(), [b"", b"\0", b"\r\n$5\r\n", bytes(range(256))]),
    "bool": (types.Bool, pa.bool_(), [True, False]),
    "time_us": (types.UnixTimestamp, pa.timestamp("us"), [0, 1, -1, 1_370_088_000_123_456]),
    "time_ns": (
        types.UnixTimestamp,
        pa.timestamp("ns", "Asia/Tokyo"),
        [0, -1, 1_370_088_000_000_000_001],
    ),
    "floats": (
        types.Array(types.Float32),
        pa.list_(pa.float32()),
        [[], [0.0], [0.1, -1.0, inf] * 50],
    ),
    "texts": (types.Array(types.String), pa.list_(pa.string()), [[], [""], ["a", "é" * 200]]),
    "uuid": (types.Uuid, pa.string(), ["12345678-1234-5678-1234-567812345678"]),
    "json": (types.Json, pa.string(), ['{"a": 1}', "[]"]),
    "map": (types.Map, pa.string(), ['{"a": 1}']),
    "set": (types.Set(types.Int64), pa.list_(pa.int64()), [[], [1], [1, 1]]),
}
"""Name to Feast's type, Arrow's type, and values with the edges of that type."""

SLOW = {name for name, (_, kind, _) in COLUMNS.items() if pa.types.is_list(kind)} | {"json", "map"}
"""Columns that have no layout of bytes in this project."""

KEYS: dict[str, tuple[FeastType, pa.DataType, list[Any]]] = {
    "number": (types.Int64, pa.int64(), [0, -1, 1, 2**62]),
    "small": (types.Int32, pa.int32(), [0, -1, 2**31 - 1]),
    "name": (types.String, pa.string(), ["", "a", "é{b}c", "{x}", "z" * 200]),
    "moment": (types.UnixTimestamp, pa.timestamp("us", "UTC"), [0, 1_370_088_000_000_000]),
}


def make_view(keys: list[str], features: list[str], *, created: bool) -> FeatureView:
    """The feature view `v` over a file of that name; each join key is an entity."""
    kinds = {key: KEYS[key][0].to_value_type() for key in keys}
    entities = [Entity(name=n, join_keys=[n], value_type=kind) for n, kind in kinds.items()]
    view = FeatureView(
        name="v",
        entities=entities,
        ttl=timedelta(days=1000),
        schema=[Field(name=n, dtype=COLUMNS[n][0]) for n in features],
        source=FileSource(
            name="v_rows",
            path="v",
            timestamp_field="event",
            created_timestamp_column="created" if created else "",
        ),
    )
    view.entity_columns = [Field(name=key, dtype=KEYS[key][0]) for key in keys]
    return view


def make_rows(
    seed: int, keys: list[str], features: list[str], num_rows: int, unit: str, zone: str | None
) -> pa.RecordBatch:
    """Random rows, keys may repeat; a fifth of the values is null, and some columns have none.

    Event times lie on a few microseconds around noon, so that ties and near misses are common.
    """
    draw = random.Random(seed)
    columns: dict[str, pa.Array] = {}
    for name in keys:
        _, kind, values = KEYS[name]
        columns[name] = pa.array([draw.choice(values) for _ in range(num_rows)], kind)
    for name in features:
        _, kind, values = COLUMNS[name]
        nulls = draw.choice([0.0, 0.2, 1.0 if name not in ("json", "map") else 0.2])
        chosen = [None if draw.random() < nulls else draw.choice(values) for _ in range(num_rows)]
        columns[name] = pa.array(chosen, kind)
    for name in ("event", "created"):
        steps = [draw.choice([-1_000_000, -1, 0, 0, 1, 1_000_000]) for _ in range(num_rows)]
        moments = [(NOON + step * MICROSECOND).replace(tzinfo=None) for step in steps]
        whole = pa.array(moments, pa.timestamp("us"))
        columns[name] = whole.cast(pa.timestamp(unit), safe=False).cast(pa.timestamp(unit, zone))
    return pa.record_batch(columns)


def encoded(view: FeatureView, batch: pa.RecordBatch) -> EncodedRows:
    """The rows as our engine hands them to a store."""
    source = view.batch_source
    return encode_rows(
        batch,
        {c.name: c.dtype.to_value_type() for c in view.entity_columns},
        {f.name: f.dtype.to_value_type() for f in view.features},
        source.timestamp_field,
        source.created_timestamp_column or None,
    )


def repo_config(folder: Path, online: dict[str, Any], **options: Any) -> RepoConfig:
    """A project whose registry and tables lie under `folder`."""
    return RepoConfig(
        project=PROJECT,
        provider="local",
        registry={"registry_type": "file", "path": str(folder / "registry.db")},
        entity_key_serialization_version=3,
        offline_store={
            "type": "tasks.features.offline.store.AsofDuckDBOfflineStore",
            "tables_path": str(folder / "tables"),
            "spill_path": str(folder / "spill"),
        },
        online_store=online,
        **options,
    )


def online_store(kind: str, address: str) -> dict[str, Any]:
    """Our store of Redis or SQLite, as `feature_store.yaml` describes it."""
    module, name = f"tasks.features.online.{kind}_store", f"NewerWins{kind.title()}OnlineStore"
    where = "connection_string" if kind == "redis" else "path"
    return {"type": f"{module}.{name}", where: address}


def feasts_rows(view: FeatureView, batch: pa.RecordBatch) -> list[Any]:
    """The rows as Feast's own online stores take them."""
    keys = {column.name: column.dtype.to_value_type() for column in view.entity_columns}
    rows: list[Any] = _convert_arrow_to_proto(batch, view, keys)
    return rows
