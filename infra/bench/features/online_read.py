"""Online reads of a feature service from Redis, against the least that could be done by hand.

By hand means: keys serialized beforehand, one redis-py pipeline with one HMGET for each distinct
hash, each value parsed with Feast's protobuf class. No ages, no TTL, no columns, no counters.
"""

import copy
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import redis
from feast import FeatureStore
from feast.infra.online_stores.helpers import _mmh3
from feast.protos.feast.types.Value_pb2 import Value
from google.protobuf.timestamp_pb2 import Timestamp

from infra.bench.figures import Measured, at_most, interleaved, seconds
from infra.bench.parts import Bench
from infra.bench.processes import redis_server
from tasks.features.access.store import find_service, open_store
from tasks.features.config import OnlineConfig, ViewPolicy
from tasks.features.online.plan import ReadPlan, RequestedKeys
from tasks.features.online.reader import OnlineReader
from tasks.features.tables.build import current_tables, features_folder

ENTITIES = (1, 100)


def figures(bench: Bench) -> Measured:
    """Times beside those of raw reads, and values that are not Feast's."""
    settings, num_rounds = bench.settings, bench.size(400, 8)
    tables = current_tables(settings.features_home, settings.store)
    embedded = open_store(
        settings.features_home, settings.feature_repo, features_folder(tables, settings.store)
    )
    service = find_service(embedded, bench.config.features.training_set.feature_service)
    with redis_server(bench.folder) as server:
        store = _on_redis(embedded, server.connection_string)
        config = OnlineConfig(policy=ViewPolicy(stale="serve"), timeout_s=5)
        reader = OnlineReader(store, service, config)
        entities = _entities(reader.plan, embedded, max(ENTITIES))
        _copy(reader.plan, embedded, store, entities)
        raw = _Raw(reader.plan, server.port)
        found: Measured = []
        for count in ENTITIES:
            some = {name: values[:count] for name, values in entities.items()}
            found += _measure(reader, raw, store, some, num_rounds)
        return found


def _on_redis(embedded: FeatureStore, address: str) -> FeatureStore:
    config = copy.deepcopy(embedded.config)
    config.online_config = {"type": "redis", "connection_string": address}
    config._online_store = None
    return FeatureStore(config=config)


def _entities(plan: ReadPlan, store: FeatureStore, count: int) -> dict[str, list[Any]]:
    """Keys that exist, one column a key; two-key views are met by chance, as in real requests."""
    columns: dict[str, list[Any]] = {}
    for group in plan.groups:
        for view in sorted(group.views, key=lambda v: len(plan.views[v].features)):
            source = plan.views[view].definition.batch_source
            folder = Path(store.config.offline_store.tables_path) / source.path
            rows = ds.dataset(folder, format="parquet").head(200_000, columns=list(group.join_keys))
            keys = rows.group_by(list(group.join_keys)).aggregate([]).to_pydict()
            for join_key, column in zip(group.join_keys, group.columns, strict=True):
                some = (sorted(set(keys[join_key])) * count)[:count]
                columns.setdefault(column, some)
    return columns


def _copy(
    plan: ReadPlan, source: FeatureStore, target: FeatureStore, entities: dict[str, list[Any]]
) -> None:
    """Write what the embedded store has of these entities to Redis, with Feast's own writer."""
    reading, writing = source._get_provider(), target._get_provider()
    for group in plan.groups:
        distinct = RequestedKeys(group, entities, max(ENTITIES)).distinct
        keys = [group.entity_key(key) for key in distinct]
        for position in group.views:
            view = plan.views[position].definition
            found = reading.online_read(source.config, view, keys)
            rows = [
                (key, values, moment, None)
                for key, (moment, values) in zip(keys, found, strict=True)
                if values
            ]
            writing.online_write_batch(target.config, view, rows, None)


class _Raw:
    """The read by hand."""

    def __init__(self, plan: ReadPlan, port: int) -> None:
        self._plan = plan
        self._client = redis.Redis(host="127.0.0.1", port=port)
        self._fields = [
            [_mmh3(f"{plan.views[f.view].stored_name}:{f.name}") for f in group.cells]
            + [f"_ts:{plan.views[view].stored_name}".encode() for view in group.views]
            for group in plan.groups
        ]

    def keys(self, entities: dict[str, list[Any]]) -> list[list[bytes]]:
        """Distinct hashes of the request, by group."""
        count = len(next(iter(entities.values())))
        project = self._plan.project.encode()
        asked = [(group, RequestedKeys(group, entities, count)) for group in self._plan.groups]
        return [[group.encoder()(key) + project for key in keys.distinct] for group, keys in asked]

    def read(self, keys: list[list[bytes]]) -> list[Any]:
        """Fetch and parse every field."""
        with self._client.pipeline(transaction=False) as pipe:
            for fields, distinct in zip(self._fields, keys, strict=True):
                for key in distinct:
                    pipe.hmget(key, fields)  # type: ignore[arg-type]  # bytes are well
            replies = pipe.execute()
        parsed: list[Any] = []
        at = 0
        for group, distinct in zip(self._plan.groups, keys, strict=True):
            width = len(group.cells)
            for reply in replies[at : at + len(distinct)]:
                parsed.append(
                    [Value.FromString(cell) if cell else None for cell in reply[:width]]
                    + [Timestamp.FromString(cell) if cell else None for cell in reply[width:]]
                )
            at += len(distinct)
        return parsed


def _measure(
    reader: OnlineReader,
    raw: _Raw,
    store: FeatureStore,
    entities: dict[str, list[Any]],
    num_rounds: int,
) -> Measured:
    """Median times of one read, all measured in turn in one run."""
    service = store.get_feature_service(reader.plan.service)
    keys = raw.keys(entities)
    through_feast = partial(store.get_online_features, service, entities, full_feature_names=True)
    reads: dict[str, Callable[[], Any]] = {
        "ours": partial(reader.read, entities),
        "by hand": partial(raw.read, keys),
        "Feast": through_feast,
    }
    times = interleaved({name: partial(seconds, each) for name, each in reads.items()}, num_rounds)
    ours, by_hand, feast = (1000 * statistics.median(times[name]) for name in reads)
    count = len(next(iter(entities.values())))
    beside = f"{ours:.2f} ms; Feast's SDK {feast / by_hand:.1f}"
    differing = _differing(reader, through_feast().to_dict(), entities)
    features = f"{len(reader.plan.features)} features"
    return [
        at_most(f"online read of {count} to raw HMGET, p50", ours / by_hand, 3, beside),
        at_most(f"values of {count} that differ from Feast's", differing, 0, features),
    ]


def _differing(
    reader: OnlineReader, theirs: dict[str, list[Any]], entities: dict[str, list[Any]]
) -> int:
    """Values in which the two differ.

    Raises:
        RuntimeError: Feast answers with other features, so not the same was asked for.
    """
    rows = reader.read(entities).rows()
    named = {
        feature.output: f"{view.definition.projection.name_to_use()}__{feature.name}"
        for view in reader.plan.views
        for feature in view.features
    }
    if only := set(named.values()) ^ (set(theirs) - set(entities)):
        raise RuntimeError(
            f"the reader and Feast give other features, of {len(named)}: {sorted(only)[:8]}"
        )
    return sum(
        row[ours] != value
        for ours, feast in named.items()
        for row, value in zip(rows, theirs[feast], strict=True)
    )
