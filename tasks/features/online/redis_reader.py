"""Read from Redis in one round trip: one HMGET for each distinct key, all sent together.

Commands are put together from parts prepared once, so that sending a request copies bytes and
nothing else. A hash holds all views of one entity key, and HMGET reads it in one step, so no reader
can see a view half written.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from feast import FeatureStore
from feast.infra.online_stores.helpers import _mmh3
from feast.infra.online_stores.redis import RedisOnlineStore
from redis.backoff import NoBackoff
from redis.retry import Retry

from tasks.features.config import OnlineConfig
from tasks.features.online.answer import protobuf_moment
from tasks.features.online.backend import Breaker, OnlineBackend, Pool, Rows, chunks, key_values
from tasks.features.online.plan import KeyGroup, ReadPlan
from tasks.features.online.redis_store import key_pattern
from tasks.kernel.errors import FeatureStoreError

AWAY = (redis.ConnectionError, redis.TimeoutError, OSError)

KEYS_PER_TRIP = 5000
"""A request of more keys goes in several round trips, which bounds what the server must buffer."""


class RedisBackend(OnlineBackend):
    """One Redis server, as Feast's store writes to it."""

    name = "redis"

    def __init__(self, store: FeatureStore, plan: ReadPlan, config: OnlineConfig) -> None:
        super().__init__(store, plan, config)
        nodes, options = RedisOnlineStore._parse_connection_string(
            store.config.online_store.connection_string
        )
        given: dict[str, Any] = {
            "socket_timeout": config.timeout_s,
            "socket_connect_timeout": config.timeout_s,
            **options,
            **nodes[0],
            "retry": Retry(NoBackoff(), 0),  # the breaker alone decides when to ask again
            "decode_responses": False,
        }
        self._client = redis.Redis(**given)
        self._new_pool()
        where = f"{nodes[0]['host']}:{nodes[0].get('port', 6379)}"
        self._breaker = Breaker(f"Redis at {where}", AWAY)
        self._project = plan.project.encode()
        self._commands = [
            _command(group, plan, encode)
            for group, encode in zip(plan.groups, self._encoders, strict=True)
        ]

    moment = staticmethod(protobuf_moment)

    def fetch(self, keys: Sequence[list[Any]]) -> list[Rows]:
        """See `OnlineBackend`."""
        commands = [
            command(key)
            for command, distinct in zip(self._commands, keys, strict=True)
            for key in distinct
        ]
        replies: list[Any] = []
        if commands:
            with self._connection() as connection:
                for batch in chunks(commands, KEYS_PER_TRIP):
                    connection.send_packed_command([b"".join(batch)])
                    replies += [connection.read_response() for _ in batch]
        ends = list(itertools.accumulate(map(len, keys), initial=0))
        return [replies[start:end] for start, end in itertools.pairwise(ends)]

    def stored_keys(self, view: int, count: int) -> list[dict[str, Any]]:
        """See `OnlineBackend`; those that a scan meets first, of at most 100 times as many."""
        group = next(g for g in self._plan.groups if view in g.views)
        pattern = key_pattern(group.join_keys, self._project)
        field = f"_ts:{self._plan.views[view].stored_name}"
        found: list[dict[str, Any]] = []
        with self._breaker.attempt(), self._explained():
            scanned = self._client.scan_iter(match=pattern, count=1000)
            for key in itertools.islice(scanned, 100 * count):
                if len(found) < count and self._client.hexists(key, field):
                    found.append(key_values(key.removesuffix(self._project)))
        return found

    def close(self) -> None:
        """See `OnlineBackend`."""
        self._pool.close()
        self._client.close()

    def _new_pool(self) -> None:
        self._owner = os.getpid()
        connect = self._client.connection_pool.make_connection
        self._pool: Pool[Any] = Pool(connect, lambda opened: opened.disconnect(), self._config)

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """A connection that is ready to send; errors become ours, as `_explained` says them."""
        if self._owner != os.getpid():  # sockets must not be shared with the parent process
            self._new_pool()
        with self._breaker.attempt(), self._explained(), self._pool.lend() as connection:
            _make_ready(connection)
            yield connection

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of the client become ours.

        Raises:
            FeatureStoreError: the server refuses the user or the command.
        """
        try:
            yield
        except redis.AuthenticationError as exc:
            raise FeatureStoreError(
                f"Redis refuses the user or password of online_store.connection_string ({exc}). "
                "Nothing was read; correct them"
            ) from exc
        except AWAY:
            raise  # the breaker's
        except redis.RedisError as exc:
            raise FeatureStoreError(
                f"Redis refuses to read features: {exc}. Nothing was read; expected hashes that "
                "Feast wrote and the user may read"
            ) from exc


def _command(
    group: KeyGroup, plan: ReadPlan, encode: Callable[[Any], bytes]
) -> Callable[[Any], bytes]:
    """Function that gives HMGET for one key as Redis reads it from the wire."""
    fields = [_mmh3(f"{plan.views[f.view].stored_name}:{f.name}") for f in group.cells]
    fields += [f"_ts:{plan.views[position].stored_name}".encode() for position in group.views]
    head = b"*%d\r\n$5\r\nHMGET\r\n$" % (len(fields) + 2)
    tail = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(f), f) for f in fields)
    project = plan.project.encode()

    def command(key: Any) -> bytes:
        packed = encode(key) + project
        return b"%b%d\r\n%b%b" % (head, len(packed), packed, tail)

    return command


def _make_ready(connection: Any) -> None:
    """Connect; and connect again where the server closed what was open, or something was left."""
    connection.connect()
    try:
        stale = connection.can_read(timeout=0)
    except (redis.ConnectionError, OSError):
        stale = True
    if stale:
        connection.disconnect()
        connection.connect()
