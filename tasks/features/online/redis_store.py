"""Feast online store on Redis with the rules of `write_rules.py`, for pushed values too.

A plug-in by Feast's own extension point: name it as `online_store.type`. Feast's own Redis store
compares first and writes later, drops a value of an equal event time whatever its `created`, and
keeps no trace of what wrote a value. The layout is Feast's, which its own store can read; `created`
and the origin lie in the field of the event time, behind what Feast reads of it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Self

import numpy as np
import pyarrow as pa
from feast.entity import Entity
from feast.feature_view import FeatureView
from feast.infra.key_encoding_utils import serialize_entity_key, serialize_entity_key_prefix
from feast.infra.online_stores.helpers import _mmh3, compute_versioned_name
from feast.infra.online_stores.redis import RedisOnlineStore, RedisOnlineStoreConfig
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.protos.feast.types.Value_pb2 import Value
from feast.repo_config import RepoConfig
from feast.value_type import ValueType
from pydantic import model_validator
from redis import Redis
from redis.cluster import RedisCluster

from tasks.features.online.encoding import NO_TIME, EncodedColumn, EncodedRows
from tasks.features.online.redis_writer import (
    MOMENT,
    RedisTarget,
    redis_errors_explained,
    write_rows,
)
from tasks.features.online.wire_format import BINARY
from tasks.features.online.write_rules import (
    PUSHED,
    Extent,
    Origin,
    checked,
    current_origin,
    micros,
)

SCANNED_KEYS = 1000
"""Keys in one step of a walk over the server's keys, between which it answers others."""

SELECT = (
    """
local rule, act, time_field = ARGV[1], ARGV[2], ARGV[3]
local began, start_us, end_us = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
"""
    + MOMENT
    + """
local function is_meant(old)
  if rule == 'all' then return true end
  local seconds, nanos, _, origin = moment(old)
  if rule == 'unknown' then return origin == nil end
  if rule == 'not of the table' then return not origin or origin == 0 end
  local us = seconds * 1000000 + nanos / 1000
  return origin and origin > 0 and origin < began and us >= start_us and us <= end_us
end

local found = 0
for k = 1, #KEYS do
  local old = redis.call('HGET', KEYS[k], time_field)
  if old and is_meant(old) then
    local held = 1
    if act == 'remove' then
      held = 0
      for i = 7, #ARGV do held = held + redis.call('HDEL', KEYS[k], ARGV[i]) end
    end
    if held > 0 then found = found + 1 end
  end
end
return found
"""
)
"""Counts or removes values of some keys, each in one step; Redis drops a hash without fields."""


class NewerWinsRedisOnlineStoreConfig(RedisOnlineStoreConfig):
    """Settings in `feature_store.yaml`: those of Feast's Redis store."""

    type: str = "tasks.features.online.redis_store.NewerWinsRedisOnlineStore"

    @model_validator(mode="after")
    def _always_compares(self) -> Self:
        if self.skip_dedup:
            raise ValueError("this online store compares before each write; remove skip_dedup")
        return self


class NewerWinsRedisOnlineStore(RedisOnlineStore):
    """Redis or Redis Cluster in which an entity's values of a view change in one step."""

    def online_write_batch(
        self,
        config: RepoConfig,
        table: FeatureView,
        data: list[tuple[EntityKey, dict[str, Value], datetime, datetime | None]],
        progress: Callable[[int], Any] | None,
    ) -> None:
        """Write the rows whose times are not older than what is stored for their entity.

        Raises:
            WindowError: a time lies in the future. Others as for `write_rows`.
        """
        by_features: dict[tuple[str, ...], list[Any]] = {}
        for row in data:
            by_features.setdefault(tuple(row[1]), []).append(row)
        for features, rows in by_features.items():
            encoded = _encoded(rows, features, config.entity_key_serialization_version)
            self._write(config, table, features, [encoded], current_origin())
        if progress:
            progress(len(data))

    async def online_write_batch_async(
        self,
        config: RepoConfig,
        table: FeatureView,
        data: list[tuple[EntityKey, dict[str, Value], datetime, datetime | None]],
        progress: Callable[[int], Any] | None,
    ) -> None:
        """As `online_write_batch`, on another thread."""
        await asyncio.to_thread(self.online_write_batch, config, table, data, progress)

    def write_rows(
        self,
        config: RepoConfig,
        table: FeatureView,
        batches: Iterable[EncodedRows],
        origin: Origin = PUSHED,
    ) -> int:
        """Write encoded rows; return how many entities got new values, the others had newer ones.

        Raises:
            WindowError: a time lies in the future. Others as for `redis_writer.write_rows`.
        """
        return self._write(config, table, [f.name for f in table.features], batches, origin)

    def count_left_behind(
        self, config: RepoConfig, table: FeatureView, start_us: int, origin: Origin
    ) -> int:
        """Entities with a value in the window that this materialization did not find any more."""
        window = (origin.began_us, start_us, origin.end_us)
        return self._select(config, table, "behind", window, remove=False)

    def remove_left_behind(
        self, config: RepoConfig, table: FeatureView, start_us: int, origin: Origin
    ) -> None:
        """Remove what `count_left_behind` counts."""
        window = (origin.began_us, start_us, origin.end_us)
        self._select(config, table, "behind", window)

    def remove_values(
        self,
        config: RepoConfig,
        table: FeatureView,
        keys: Sequence[bytes] | None = None,
        features: Sequence[str] | None = None,
        extent: Extent = "all",
    ) -> int:
        """Remove values of a view; return how many entities had one.

        Args:
            keys: serialized entity keys; None for all.
            features: names; None for all.
            extent: which of them.
        """
        return self._select(config, table, extent, keys=keys, features=features)

    def update(
        self,
        config: RepoConfig,
        tables_to_delete: Sequence[FeatureView],
        tables_to_keep: Sequence[FeatureView],
        entities_to_delete: Sequence[Entity],
        entities_to_keep: Sequence[Entity],
        partial: bool,
    ) -> None:
        """Remove the values of views that are gone, of all their versions."""
        kept = {_stored_name(config, view) for view in tables_to_keep}
        for view in tables_to_delete if config.online_store.full_scan_for_deletion else ():
            for name in sorted(self._stored_versions(config, view) - kept):
                self._select(config, view, "all", name=name)

    def _write(
        self,
        config: RepoConfig,
        view: FeatureView,
        features: Sequence[str],
        batches: Iterable[EncodedRows],
        origin: Origin,
    ) -> int:
        target = _target(config, _stored_name(config, view), features, origin)
        client = self._get_client(config.online_store)
        return write_rows(client, target, checked(view.name, batches))

    def _select(
        self,
        config: RepoConfig,
        view: FeatureView,
        rule: str,
        window: tuple[int, int, int] = (0, 0, 0),
        *,
        remove: bool = True,
        keys: Sequence[bytes] | None = None,
        features: Sequence[str] | None = None,
        name: str | None = None,
    ) -> int:
        """Run the script over a view's keys; return how many had a value that is meant."""
        names = [f.name for f in view.features] if features is None else features
        target = _target(config, name or _stored_name(config, view), names)
        fields = [*([target.time_field] if features is None else []), *target.fields.values()]
        act = b"remove" if remove else b"count"
        words = [rule.encode(), act, target.time_field, *(b"%d" % us for us in window), *fields]
        client = self._get_client(config.online_store)
        walk = self._all_keys(config, view)
        if keys is not None:
            walk = iter([(client, [key + target.suffix for key in keys])])
        with redis_errors_explained():
            clustered = isinstance(client, RedisCluster)
            return sum(_run(node, some, words, clustered=clustered) for node, some in walk)

    def _all_keys(self, config: RepoConfig, view: FeatureView) -> Iterator[tuple[Any, list[bytes]]]:
        """Keys of all entities of the view's kind, some at a time, with the node that has them."""
        version = config.entity_key_serialization_version
        head = serialize_entity_key_prefix(list(view.join_keys), version)
        project = config.project.encode()
        pattern = b"*".join(re.sub(rb"([*?\[\]\\^-])", rb"\\\1", part) for part in (head, project))
        for node in _nodes(self._get_client(config.online_store)):
            cursor = None
            while cursor != 0:
                cursor, keys = node.scan(cursor or 0, match=pattern, count=SCANNED_KEYS)
                if keys:
                    yield node, keys

    def _stored_versions(self, config: RepoConfig, view: FeatureView) -> set[str]:
        """Names under which values of a view are kept: of its first version, and numbered ones."""
        field = re.compile(rb"_ts:(" + re.escape(view.name).encode() + rb"(_v\d+)?)")
        found: set[str] = set()
        for node, keys in self._all_keys(config, view):
            pipeline = node.pipeline(transaction=False)
            for key in keys:
                pipeline.hkeys(key)
            for names in pipeline.execute():
                matches = (field.fullmatch(name) for name in names)
                found |= {match[1].decode() for match in matches if match}
        return found


def _stored_name(config: RepoConfig, view: FeatureView) -> str:
    versioned = config.registry.enable_online_feature_view_versioning
    return str(compute_versioned_name(view, versioned))


def _target(
    config: RepoConfig, name: str, features: Iterable[str], origin: Origin = PUSHED
) -> RedisTarget:
    """The layout of `RedisOnlineStore`."""
    return RedisTarget(
        suffix=config.project.encode(),
        time_field=f"_ts:{name}".encode(),
        fields={feature: _mmh3(f"{name}:{feature}") for feature in features},
        ttl_s=config.online_store.key_ttl_seconds or 0,
        origin=origin,
    )


def _encoded(rows: Sequence[Any], features: Sequence[str], version: int) -> EncodedRows:
    """Rows as Feast hands them over, as columns of bytes."""
    keys = [serialize_entity_key(key, entity_key_serialization_version=version) for key, *_ in rows]
    created = [NO_TIME if moment is None else micros(moment) for *_, moment in rows]
    columns = {
        name: pa.array([values[name].SerializeToString() for _, values, *_ in rows], BINARY)
        for name in features
    }
    return EncodedRows(
        keys=pa.array(keys, BINARY),
        events_us=np.array([micros(event) for _, _, event, _ in rows], np.int64),
        created_us=np.array(created, np.int64),
        features={
            name: EncodedColumn(cells, cells, ValueType.UNKNOWN, converted_by_feast=True)
            for name, cells in columns.items()
        },
    )


def _run(node: Any, keys: list[bytes], words: Sequence[bytes], *, clustered: bool) -> int:
    """Run the script over keys; those of a cluster's command must share a slot, so one by one."""
    size = 1 if clustered else SCANNED_KEYS
    groups = [keys[start : start + size] for start in range(0, len(keys), size)]
    if isinstance(node, RedisCluster):  # it finds each key's own node
        counts: list[Any] = [node.eval(SELECT, 1, *some, *words) for some in groups]
        return sum(counts)
    pipeline = node.pipeline(transaction=False)
    for some in groups:
        pipeline.eval(SELECT, len(some), *some, *words)
    return sum(pipeline.execute())


def _nodes(client: Redis | RedisCluster) -> list[Any]:
    if not isinstance(client, RedisCluster):
        return [client]
    primaries: list[Any] = client.get_primaries()  # type: ignore[no-untyped-call]
    return [client.get_redis_connection(node) for node in primaries]
