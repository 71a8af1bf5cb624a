"""A small Feast store with views of every kind, for tests that write and read it online."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from feast import Entity, FeatureService, FeatureStore, FeatureView, Field, FileSource, ValueType
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.repo_config import RepoConfig
from feast.type_map import python_values_to_proto_values
from feast.types import (
    Array,
    Bool,
    Bytes,
    FeastType,
    Float32,
    Float64,
    Int32,
    Int64,
    Json,
    Map,
    Set,
    String,
    UnixTimestamp,
    Uuid,
)

NOON = datetime(2013, 3, 1, 12, tzinfo=UTC)
TYPES: dict[str, FeastType] = {
    "float": Float32,
    "double": Float64,
    "int": Int32,
    "long": Int64,
    "text": String,
    "raw": Bytes,
    "flag": Bool,
    "moment": UnixTimestamp,
    "uuid": Uuid,
    "json": Json,
    "mapping": Map,
    "floats": Array(Float32),
    "texts": Array(String),
    "longs": Set(Int64),
}


@dataclass
class TypedStore:
    """The store and a way to write to it."""

    feast: FeatureStore

    @property
    def service(self) -> FeatureService:
        return self.feast.get_feature_service("all")

    def write(
        self,
        view: str,
        key: Mapping[str, Any],
        values: Mapping[str, Any],
        event_time: datetime = NOON,
    ) -> None:
        """Write one entity of a view through Feast's own online write."""
        self.write_rows(view, [(key, values, event_time)])

    def close(self) -> None:
        """Close Feast's connection to a SQLite store, so that its file can be exchanged."""
        store = self.feast._get_provider().online_store
        store._conn.close()
        store._conn = None

    def write_rows(
        self, view: str, rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Any], datetime]]
    ) -> None:
        """Write entities of a view through Feast's own online write."""
        definition = self.feast.get_feature_view(view)
        kinds = {c.name: c.dtype.to_value_type() for c in definition.entity_columns}
        types = {f.name: f.dtype.to_value_type() for f in definition.features}
        packed = [
            (
                EntityKey(
                    join_keys=list(key),
                    entity_values=[
                        python_values_to_proto_values([v], kinds[k])[0] for k, v in key.items()
                    ],
                ),
                {
                    name: python_values_to_proto_values([value], types[name])[0]
                    for name, value in values.items()
                },
                event_time,
                None,
            )
            for key, values, event_time in rows
        ]
        provider = self.feast._get_provider()
        provider.online_write_batch(self.feast.config, definition, packed, None)


def typed_store(folder: Path, online_store: dict[str, Any]) -> TypedStore:
    """Apply the definitions to a new store in `folder`."""
    (folder / "tables").mkdir(parents=True)
    config = RepoConfig(
        project="typed",
        provider="local",
        registry={"registry_type": "sql", "path": f"sqlite:///{folder / 'registry.db'}"},
        offline_store={
            "type": "tasks.features.offline.store.AsofDuckDBOfflineStore",
            "tables_path": str(folder / "tables"),
            "spill_path": str(folder / "spill"),
        },
        online_store=online_store,
        entity_key_serialization_version=3,
        repo_path=folder,
    )
    feast = FeatureStore(config=config)
    feast.apply(_definitions())
    return TypedStore(feast)


def _view(name: str, entities: list[Entity], ttl: timedelta, **types: FeastType) -> FeatureView:
    return FeatureView(
        name=name,
        entities=entities,
        ttl=ttl,
        schema=[Field(name=feature, dtype=kind) for feature, kind in types.items()],
        source=FileSource(name=f"{name}_table", path=name, timestamp_field="event_timestamp"),
    )


def _definitions() -> list[Any]:
    user = Entity(name="user", join_keys=["user_id"], value_type=ValueType.INT64)
    place = Entity(name="place", join_keys=["place"], value_type=ValueType.STRING)
    small = Entity(name="small", join_keys=["small"], value_type=ValueType.INT32)
    hours, day = timedelta(hours=1), timedelta(days=1)
    every = _view("every", [place], 6 * hours, **TYPES)
    same_key = _view("same_key", [place], timedelta(0), text=String, wide=Float64)
    pair = _view("pair", [user, place], day, score=Float32, count=Int64)
    single = _view("single", [small], hours, level=Float32)
    world = _view("world", [], day, mood=Float32)
    here = same_key.with_name("here")
    elsewhere = same_key.with_name("elsewhere").with_join_key_map({"place": "destination"})
    features = [every[["float", "text"]], here, elsewhere, pair, single, world]
    services = [
        FeatureService(name="all", features=features),
        FeatureService(name="whole", features=[every]),
        FeatureService(name="abroad", features=[elsewhere]),
    ]
    return [user, place, small, every, same_key, pair, single, world, *services]
