"""Write encoded rows to Redis: many entities in one command, each compared and written at once.

A script on the server compares an entity's times with the stored ones, as `write_rules.py` says,
and writes all its values in one step, so no reader sees half of them, and of two writers the newer
value stays whoever comes last. Field names travel once for a group of entities, and each group has
one short answer.
"""

from __future__ import annotations

import binascii
import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from redis import Redis
from redis.cluster import RedisCluster
from redis.exceptions import BusyLoadingError, NoScriptError, RedisError
from redis.exceptions import ConnectionError as ConnectionLostError
from redis.exceptions import TimeoutError as NoAnswerError

from tasks.features.online.encoding import NO_TIME, EncodedRows, encode_timestamps
from tasks.features.online.wire_format import BINARY, constant, contents, fixed, join_parts
from tasks.features.online.write_rules import PUSHED, Origin
from tasks.kernel.errors import FeatureStoreError, TransientError

GROUP_ROWS = 64
"""Entities in one command: the server answers other clients between two of them."""

CREATED_TAG, ORIGIN_TAG = b"\x19", b"\x21"
"""Of protobuf: fields 3 and 4, eight bytes each."""

NUM_SLOTS = 16384
"""Slots of a Redis Cluster; a key belongs to one of them."""

MOMENT = """
local byte, unpack_bytes = string.byte, struct.unpack

-- Seconds, nanoseconds, created and origin of a stored time, as `_stored_times` lays it out.
local function moment(text)
  local seconds, nanos, created, origin, at = 0, 0, -math.huge, nil, 1
  while at <= #text do
    local tag = byte(text, at)
    if tag == 25 or tag == 33 then
      local value = unpack_bytes('<i8', text, at + 1)
      if tag == 25 then created = value else origin = value end
      at = at + 9
    else
      local value, inverse, scale, first = 0, 0, 1, at + 1
      repeat
        at = at + 1
        local group = byte(text, at) % 128
        value = value + group * scale
        if at - first < 9 then inverse = inverse + (127 - group) * scale end
        scale = scale * 128
      until byte(text, at) < 128
      if at - first == 9 then value = -inverse - 1 end -- ten bytes: a negative number
      at = at + 1
      if tag == 8 then seconds = value else nanos = value end
    end
  end
  return seconds, nanos, created, origin
end
"""

SCRIPT = (
    """
local KEYS, ARGV, call, unpack = KEYS, ARGV, redis.call, unpack
local ttl, began, end_us = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local count, time_field = tonumber(ARGV[4]), ARGV[5]
local hash = {}
for i = 0, count - 1 do hash[2 * i + 1] = ARGV[5 + i] end
"""
    + MOMENT
    + """
local function is_taken(key, new)
  local old = call('HGET', key, time_field)
  if not old then return true end
  local old_s, old_n, old_created, old_origin = moment(old)
  local new_s, new_n, new_created = moment(new)
  if new_s ~= old_s then
    if new_s > old_s then return true end
  elseif new_n ~= old_n then
    if new_n > old_n then return true end
  elseif new_created ~= old_created then
    if new_created > old_created then return true end
  elseif began == 0 or (old_origin or 0) <= began then
    return true
  end
  return old_origin and old_origin > 0 and old_origin < began
    and old_s * 1000000 + old_n / 1000 <= end_us
end

local written, start = 0, 5 + count
for k = 1, #KEYS do
  local key = KEYS[k]
  if is_taken(key, ARGV[start]) then
    for i = 0, count - 1 do hash[2 * i + 2] = ARGV[start + i] end
    for i = 1, 2 * count, 4000 do -- as many as fit on the script's stack
      call('HSET', key, unpack(hash, i, math.min(i + 3999, 2 * count)))
    end
    if ttl > 0 then call('EXPIRE', key, ttl) end
    written = written + 1
  end
  start = start + count
end
return written
"""
)
SCRIPT_SHA = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest().encode()


@dataclass(frozen=True)
class RedisTarget:
    """Where and how the values of one feature view are kept.

    Attributes:
        suffix: what follows the entity key in a Redis key: the project.
        time_field: field of the event time.
        fields: feature name to field name.
        ttl_s: seconds after which an entity that is not written again is dropped; 0 for never.
        origin: what writes, see `write_rules.py`.
    """

    suffix: bytes
    time_field: bytes
    fields: Mapping[str, bytes]
    ttl_s: int = 0
    origin: Origin = PUSHED


def write_rows(
    client: Redis | RedisCluster, target: RedisTarget, batches: Iterable[EncodedRows]
) -> int:
    """Write batches of rows; return how many entities got new values, the others had newer ones.

    A batch is encoded while the server works on the one before it; no more than these two are held.

    Raises:
        TransientError: the connection was lost or the server is not ready. What was written stays,
            and writing it again changes nothing.
        FeatureStoreError: the server refused the write.
    """
    with redis_errors_explained(), _lanes(client) as lanes:
        for rows in batches:
            keys = join_parts([rows.keys, constant(target.suffix)], len(rows))
            values = _bulk(_stored_times(rows, target.origin))
            for name in target.fields:
                values += _bulk(rows.features[name].cells)
            lanes.send(target, keys, join_parts(values, len(rows)))
        return lanes.finish()


def _stored_times(rows: EncodedRows, origin: Origin) -> pa.LargeBinaryArray:
    """Feast's event time, a protobuf `Timestamp`, and behind it two fields that Feast passes over.

    Field 3 is `created` in microseconds, where there is one; field 4 the origin.
    """
    parts: list[pa.Array | pa.Scalar] = [encode_timestamps(rows.events_us)]
    if rows.created_us is not None:
        known = rows.created_us != NO_TIME
        parts.append(fixed(CREATED_TAG, rows.created_us, None if known.all() else known))
    return join_parts(
        [*parts, constant(ORIGIN_TAG + struct.pack("<q", origin.began_us))], len(rows)
    )


@dataclass
class _Lane:
    """One connection with commands under way."""

    connection: Any
    awaited: int = 0
    written: int = 0

    def send(self, data: list[Any], num_commands: int) -> None:
        self.drain()
        self.connection.send_packed_command(data)
        self.awaited = num_commands

    def drain(self) -> None:
        while self.awaited:
            self.awaited -= 1
            self.written += self.connection.read_response()


@dataclass
class _Lanes:
    """The connections to a server, or to all primaries of a cluster."""

    lanes: Sequence[_Lane]
    lane_of_slot: np.ndarray | None = field(default=None)

    def send(self, target: RedisTarget, keys: pa.LargeBinaryArray, values: pa.Array) -> None:
        if self.lane_of_slot is None:
            self.lanes[0].send(*_grouped(target, keys, values))
            return
        slots = np.fromiter((_slot(key) for key in keys.to_pylist()), np.int64, len(keys))
        places = self.lane_of_slot[slots]
        for number, lane in enumerate(self.lanes):
            mine = pa.array(np.flatnonzero(places == number))
            if len(mine):
                lane.send(*_single(target, keys.take(mine), values.take(mine)))

    def finish(self) -> int:
        for lane in self.lanes:
            lane.drain()
        return sum(lane.written for lane in self.lanes)


@contextmanager
def _lanes(client: Redis | RedisCluster) -> Iterator[_Lanes]:
    with ExitStack() as stack:
        if not isinstance(client, RedisCluster):
            yield _Lanes([stack.enter_context(_lane(client))])
            return
        nodes: list[Any] = client.get_primaries()  # type: ignore[no-untyped-call]
        lanes = [stack.enter_context(_lane(client.get_redis_connection(n))) for n in nodes]
        names = [node.name for node in nodes]
        owners = [client.nodes_manager.get_node_from_slot(s).name for s in range(NUM_SLOTS)]
        yield _Lanes(lanes, np.array([names.index(owner) for owner in owners]))


@contextmanager
def _lane(client: Redis) -> Iterator[_Lane]:
    pool = client.connection_pool
    connection: Any = pool.get_connection()
    try:
        connection.send_command("SCRIPT", "LOAD", SCRIPT)
        connection.read_response()
        yield _Lane(connection)
    except BaseException:
        connection.disconnect()  # answers under way must not reach the next user
        raise
    finally:
        pool.release(connection)


def _grouped(
    target: RedisTarget, keys: pa.LargeBinaryArray, values: pa.LargeBinaryArray
) -> tuple[list[Any], int]:
    """Commands of up to `GROUP_ROWS` entities each, and their number."""
    key_ends, key_data = contents(join_parts(_bulk(keys), len(keys)))
    value_ends, value_data = contents(values)
    key_bytes, value_bytes = memoryview(key_data.data), memoryview(value_data.data)
    fields = _fields(target)
    data: list[bytes | memoryview] = []
    starts = range(0, len(keys), GROUP_ROWS)
    for start in starts:
        end = min(start + GROUP_ROWS, len(keys))
        data += [
            _head(target, end - start),
            key_bytes[key_ends[start] : key_ends[end]],
            fields,
            value_bytes[value_ends[start] : value_ends[end]],
        ]
    return [b"".join(data)], len(starts)


def _single(
    target: RedisTarget, keys: pa.LargeBinaryArray, values: pa.LargeBinaryArray
) -> tuple[list[Any], int]:
    """One command for each entity: those of a cluster's command must share a slot."""
    parts = [constant(_head(target, 1)), *_bulk(keys), constant(_fields(target)), values]
    _, data = contents(join_parts(parts, len(keys)))
    return [data.data], len(keys)


def _head(target: RedisTarget, num_keys: int) -> bytes:
    width = len(target.fields) + 1
    words = [b"EVALSHA", SCRIPT_SHA, b"%d" % num_keys]
    return b"*%d\r\n" % (len(words) + 4 + width + num_keys * (1 + width)) + _words(words)


def _fields(target: RedisTarget) -> bytes:
    count = len(target.fields) + 1
    settings = [target.ttl_s, target.origin.began_us, target.origin.end_us, count]
    return _words([*(b"%d" % s for s in settings), target.time_field, *target.fields.values()])


def _words(words: Sequence[bytes]) -> bytes:
    return b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def _bulk(array: pa.LargeBinaryArray) -> list[pa.Array | pa.Scalar]:
    """Parts of Redis' protocol for one text in each row: its length, and the text."""
    lengths = pc.binary_length(array)
    shortest, longest = (pc.min_max(lengths)[name].as_py() for name in ("min", "max"))
    if shortest == longest:
        return [constant(b"$%d\r\n" % longest), array, constant(b"\r\n")]
    digits = pc.cast(pc.cast(lengths, pa.large_string()), BINARY)
    return [constant(b"$"), digits, constant(b"\r\n"), array, constant(b"\r\n")]


def _slot(key: bytes) -> int:
    """Slot of a key in a Redis Cluster; a part in braces alone decides it, where there is one."""
    start = key.find(b"{")
    end = key.find(b"}", start + 1) if start >= 0 else -1
    if end > start + 1:
        key = key[start + 1 : end]
    return binascii.crc_hqx(key, 0) % NUM_SLOTS


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
