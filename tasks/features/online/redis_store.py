"""Feast online store on Redis with the rules of `newer_wins.py`, for pushed values too.

Name it as `online_store.type`. Feast's own Redis store compares first and writes later, drops a
value of an equal event time whatever its `created`, and keeps no trace of what wrote a value. Here
a script on the server compares an entity's times with the stored ones and writes all its values in
one step, so no reader sees half of them, and of two writers the newer value stays whoever comes
last. The layout is Feast's; `created` and the origin lie in the field of the event time, behind
what Feast reads of it. Field names travel once for a group of entities, which has one short answer.
"""

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from feast.feature_view import FeatureView
from feast.infra.key_encoding_utils import serialize_entity_key_prefix
from feast.infra.online_stores.helpers import _mmh3, compute_versioned_name
from feast.infra.online_stores.redis import RedisOnlineStore, RedisOnlineStoreConfig
from feast.repo_config import RepoConfig
from redis import Redis
from redis.cluster import RedisCluster
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import BusyLoadingError, NoScriptError, RedisError
from redis.exceptions import ConnectionError as ConnectionLostError
from redis.exceptions import TimeoutError as NoAnswerError

from tasks.features.online import encoding, newer_wins
from tasks.kernel.errors import FeatureStoreError, TransientError

SCANNED_KEYS = 1000
"""Keys in one step of a walk over the server's keys, between which it answers others."""

GROUP_ROWS = 64
"""Entities in one command: the server answers other clients between two of them."""

CREATED_TAG, ORIGIN_TAG = b"\x19", b"\x21"
"""Of protobuf: fields 3 and 4, eight bytes each."""


@cache
def _script(name: str) -> str:
    """A program that the server runs: how stored times are read, and what is done by them."""
    parts = (Path(__file__).with_name(part) for part in ("moment.lua", name))
    return "".join(part.read_text(encoding="utf-8") for part in parts)


@cache
def _digest_of_write() -> bytes:
    """By which the server finds the program that it was given."""
    return hashlib.sha1(_script("write.lua").encode(), usedforsecurity=False).hexdigest().encode()


class NewerWinsRedisOnlineStoreConfig(RedisOnlineStoreConfig):
    """Settings in `feature_store.yaml`: those of Feast's Redis store."""

    type: str = "tasks.features.online.redis_store.NewerWinsRedisOnlineStore"


@dataclass(frozen=True)
class _Target:
    """Where and how the values of one feature view are kept, as `RedisOnlineStore` does."""

    suffix: bytes  # follows the entity key in a Redis key: the project
    time_field: bytes
    fields: dict[str, bytes]  # by feature
    ttl_s: int  # an entity that is not written again is dropped then; 0 for never
    origin: newer_wins.Origin


class NewerWinsRedisOnlineStore(newer_wins.NewerWinsOnlineStore, RedisOnlineStore):
    """Redis or Redis Cluster in which an entity's values of a view change in one step."""

    def write_rows(
        self,
        config: RepoConfig,
        table: FeatureView,
        batches: Iterable[encoding.EncodedRows],
        origin: newer_wins.Origin = newer_wins.PUSHED,
    ) -> int:
        """As `NewerWinsOnlineStore.write_rows`; writing again changes nothing twice.

        A batch is encoded while the server works on the one before it; no more than these two are
        held.
        """
        name = _stored_name(config, table)
        with (
            redis_errors_explained(),
            _connections(self._get_client(config.online_store)) as (connections, node_of_slot),
        ):
            for rows in newer_wins.checked(table.name, batches):
                target = _target(config, name, rows.features, origin)
                keys = encoding.join_parts([rows.keys, encoding.constant(target.suffix)], len(rows))
                parts = _bulk(_stored_times(rows, origin))
                for feature in rows.features.values():
                    parts += _bulk(feature.cells)
                values = encoding.join_parts(parts, len(rows))
                if node_of_slot is None:
                    connections[0].send(*_grouped(target, keys, values, GROUP_ROWS))
                    continue
                nodes = node_of_slot[[key_slot(key) for key in keys.to_pylist()]]
                for number, connection in enumerate(connections):
                    if len(mine := pa.array(np.flatnonzero(nodes == number))):
                        # Keys of a cluster's command must share a slot.
                        connection.send(*_grouped(target, keys.take(mine), values.take(mine), 1))
            for connection in connections:
                connection.await_answers()
        return sum(connection.written for connection in connections)

    def remove_values(
        self,
        config: RepoConfig,
        table: FeatureView,
        meant: newer_wins.Removal = newer_wins.EVERYTHING,
        name: str | None = None,
    ) -> int:
        """As `NewerWinsOnlineStore.remove_values`, a key in one step.

        Args:
            config, table, meant: as there.
            name: under which the view is stored; None for its present version.
        """
        names = [f.name for f in table.features] if meant.features is None else meant.features
        target = _target(config, name or _stored_name(config, table), names)
        fields = [*([target.time_field] if meant.features is None else []), *target.fields.values()]
        act = b"count" if meant.count_only else b"remove"
        window = [b"%d" % us for us in meant.window]
        words = [meant.extent.encode(), act, target.time_field, *window, *fields]
        client = self._get_client(config.online_store)
        walk = self._all_keys(config, table)
        if meant.keys is not None:
            walk = iter([(client, [key + target.suffix for key in meant.keys])])
        with redis_errors_explained():
            clustered = isinstance(client, RedisCluster)
            return sum(_run(node, some, words, clustered=clustered) for node, some in walk)

    def update(
        self,
        config: RepoConfig,
        tables_to_delete: Sequence[FeatureView],
        tables_to_keep: Sequence[FeatureView],
        *arguments: Any,
        **options: Any,
    ) -> None:
        """Remove the values of views that are gone, of all their versions."""
        kept = {_stored_name(config, view) for view in tables_to_keep}
        for view in tables_to_delete if config.online_store.full_scan_for_deletion else ():
            for name in sorted(self._stored_versions(config, view) - kept):
                self.remove_values(config, view, name=name)

    def entity_keys(self, config: RepoConfig, table: FeatureView) -> Iterator[bytes]:
        """As `NewerWinsOnlineStore.entity_keys`."""
        with redis_errors_explained():
            for _, keys in self._all_keys(config, table):
                yield from (key.removesuffix(config.project.encode()) for key in keys)

    def _all_keys(self, config: RepoConfig, view: FeatureView) -> Iterator[tuple[Any, list[bytes]]]:
        """Keys of all entities of the view's kind, some at a time, with the node that has them."""
        pattern = key_pattern(view.join_keys, config.project.encode())
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


def key_pattern(join_keys: Sequence[str], project: bytes) -> bytes:
    """What the Redis keys of all entities of a kind look like."""
    head = serialize_entity_key_prefix(list(join_keys))
    return b"*".join(re.sub(rb"([*?\[\]\\^-])", rb"\\\1", part) for part in (head, project))


def _stored_name(config: RepoConfig, view: FeatureView) -> str:
    return str(compute_versioned_name(view, config.registry.enable_online_feature_view_versioning))


def _target(
    config: RepoConfig,
    name: str,
    features: Iterable[str],
    origin: newer_wins.Origin = newer_wins.PUSHED,
) -> _Target:
    return _Target(
        suffix=config.project.encode(),
        time_field=f"_ts:{name}".encode(),
        fields={feature: _mmh3(f"{name}:{feature}") for feature in features},
        ttl_s=config.online_store.key_ttl_seconds or 0,
        origin=origin,
    )


def _run(node: Any, keys: list[bytes], words: Sequence[bytes], *, clustered: bool) -> int:
    """Run the script over keys; those of a cluster's command must share a slot, so one by one."""
    size, select = 1 if clustered else SCANNED_KEYS, _script("select.lua")
    groups = [keys[start : start + size] for start in range(0, len(keys), size)]
    if isinstance(node, RedisCluster):  # it finds each key's own node
        counts: list[Any] = [node.eval(select, 1, *some, *words) for some in groups]
        return sum(counts)
    pipeline = node.pipeline(transaction=False)
    for some in groups:
        pipeline.eval(select, len(some), *some, *words)
    return sum(pipeline.execute())


def _nodes(client: Redis | RedisCluster) -> list[Any]:
    if not isinstance(client, RedisCluster):
        return [client]
    primaries: list[Any] = client.get_primaries()  # type: ignore[no-untyped-call]
    return [client.get_redis_connection(node) for node in primaries]


def _stored_times(rows: encoding.EncodedRows, origin: newer_wins.Origin) -> pa.LargeBinaryArray:
    """Feast's event time, a protobuf `Timestamp`, and behind it two fields that Feast passes over.

    Field 3 is `created` in microseconds, where there is one; field 4 the origin.
    """
    parts: list[pa.Array | pa.Scalar] = [encoding.encode_timestamps(rows.events_us)]
    if rows.created_us is not None:
        known = rows.created_us != encoding.NO_TIME
        parts.append(encoding.fixed(CREATED_TAG, rows.created_us, None if known.all() else known))
    return encoding.join_parts(
        [*parts, encoding.constant(ORIGIN_TAG + struct.pack("<q", origin.began_us))], len(rows)
    )


class _Connection:
    """One connection with commands under way."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._awaited = self.written = 0

    def send(self, data: list[Any], num_commands: int) -> None:
        """Send the next commands when those before them are answered."""
        self.await_answers()
        self._connection.send_packed_command(data)
        self._awaited = num_commands

    def await_answers(self) -> None:
        """Count what was written by the commands under way."""
        while self._awaited:
            self._awaited -= 1
            self.written += self._connection.read_response()


@contextmanager
def _connections(
    client: Redis | RedisCluster,
) -> Iterator[tuple[list[_Connection], np.ndarray | None]]:
    """One connection to each node, and of a cluster the place in the list of each slot's node."""
    with ExitStack() as stack:
        opened = [stack.enter_context(_connection(node)) for node in _nodes(client)]
        if not isinstance(client, RedisCluster):
            yield opened, None
            return
        primaries: list[Any] = client.get_primaries()  # type: ignore[no-untyped-call]
        places = {node.name: place for place, node in enumerate(primaries)}
        owner = client.nodes_manager.get_node_from_slot
        slots = range(REDIS_CLUSTER_HASH_SLOTS)
        yield opened, np.array([places[owner(slot).name] for slot in slots])


@contextmanager
def _connection(client: Redis) -> Iterator[_Connection]:
    pool = client.connection_pool
    connection: Any = pool.get_connection()
    try:
        connection.send_command("SCRIPT", "LOAD", _script("write.lua"))
        connection.read_response()
        yield _Connection(connection)
    except BaseException:
        connection.disconnect()  # answers under way must not reach the next user
        raise
    finally:
        pool.release(connection)


def _grouped(
    target: _Target, keys: pa.LargeBinaryArray, values: pa.LargeBinaryArray, num_rows: int
) -> tuple[list[Any], int]:
    """Commands of up to `num_rows` entities each, and their number."""
    key_ends, key_data = encoding.contents(encoding.join_parts(_bulk(keys), len(keys)))
    value_ends, value_data = encoding.contents(values)
    key_bytes, value_bytes = memoryview(key_data.data), memoryview(value_data.data)
    settings = [target.ttl_s, target.origin.began_us, target.origin.end_us, len(target.fields) + 1]
    names = (target.time_field, *target.fields.values())
    fields = _words([*(b"%d" % number for number in settings), *names])
    data: list[bytes | memoryview] = []
    starts = range(0, len(keys), num_rows)
    for start in starts:
        end = min(start + num_rows, len(keys))
        data += [
            _head(target, end - start),
            key_bytes[key_ends[start] : key_ends[end]],
            fields,
            value_bytes[value_ends[start] : value_ends[end]],
        ]
    return [b"".join(data)], len(starts)


def _head(target: _Target, num_keys: int) -> bytes:
    width = len(target.fields) + 1
    words = [b"EVALSHA", _digest_of_write(), b"%d" % num_keys]
    return b"*%d\r\n" % (len(words) + 4 + width + num_keys * (1 + width)) + _words(words)


def _words(words: Sequence[bytes]) -> bytes:
    return b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def _bulk(array: pa.LargeBinaryArray) -> list[pa.Array | pa.Scalar]:
    """Parts of Redis' protocol for one text in each row: its length, and the text."""
    lengths, end = pc.binary_length(array), encoding.constant(b"\r\n")
    shortest, longest = (pc.min_max(lengths)[name].as_py() for name in ("min", "max"))
    if shortest == longest:
        return [encoding.constant(b"$%d\r\n" % longest), array, end]
    digits = pc.cast(pc.cast(lengths, pa.large_string()), encoding.BINARY)
    return [encoding.constant(b"$"), digits, end, array, end]


@contextmanager
def redis_errors_explained() -> Iterator[None]:
    """Errors of the client become ours, as `write_rows` lists them."""
    try:
        yield
    except (ConnectionLostError, NoAnswerError, BusyLoadingError, NoScriptError) as exc:
        raise TransientError(
            f"Redis did not take all values ({exc}); expected an answer to every command. Each "
            "entity has its old values or its new ones, whole; writing again changes nothing twice"
        ) from exc
    except RedisError as exc:
        if str(exc).startswith(("MOVED", "ASK", "CLUSTERDOWN", "TRYAGAIN", "READONLY")):
            raise TransientError(f"the Redis cluster is changing ({exc}); write again") from exc
        raise FeatureStoreError(
            f"Redis refused to write values ({exc}); expected hashes of Feast's own layout and "
            "enough memory. Each entity has its old values or its new ones, whole"
        ) from exc
