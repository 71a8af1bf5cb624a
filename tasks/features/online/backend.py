"""Reach an online store: Redis, SQLite, or any other through Feast's own read.

A back-end fetches cells, undecoded, for all views and keys of a request at once. It holds as many
connections as reads may run at one time, and fails fast while the store is away.
"""

import itertools
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Generic, TypeVar

from feast import FeatureStore
from feast.infra.key_encoding_utils import deserialize_entity_key
from feast.type_map import feast_value_type_to_python_type

from tasks.features.config import OnlineConfig
from tasks.features.online.newer_wins import micros
from tasks.features.online.plan import KeyGroup, ReadPlan
from tasks.kernel.errors import FeatureStoreError, TransientError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""Without a new attempt after the store failed once; doubles with each failure, up to the other."""

Rows = list[list[Any]]
"""For each key its cells: values as `KeyGroup.cells` orders them, then one event time a view."""

Connection = TypeVar("Connection")


class OnlineBackend:
    """Where values come from. Safe to use from many threads.

    Args:
        store: opened store.
        plan: what is read.
        config: time-outs, number of connections, pauses.
    """

    name: str

    def __init__(self, store: FeatureStore, plan: ReadPlan, config: OnlineConfig) -> None:
        self._store, self._plan, self._config = store, plan, config
        self._encoders = [group.encoder() for group in plan.groups]

    def fetch(self, keys: Sequence[list[Any]]) -> list[Rows]:
        """Cells of the distinct keys of each group of the plan, in their order.

        All cells of one view and key come from one moment of the store.

        Raises:
            TransientError: the store is away or did not answer in time.
            FeatureStoreError: it refuses, is damaged, or lacks a view.
        """
        raise NotImplementedError

    def moment(self, cell: Any) -> int:
        """Microseconds since 1970 of an event time as the store keeps it."""
        raise NotImplementedError

    def stored_keys(self, view: int, count: int) -> list[dict[str, Any]]:
        """Join keys of up to `count` entities that a view of the plan has stored.

        For checks, not for serving. Empty where the store cannot list its keys.
        """
        return []

    def close(self) -> None:
        """Give back every connection."""


class Breaker:
    """Keeps a store that failed from being asked by every request at once.

    After a failure nobody asks for a pause, which doubles with each further failure; then one
    request goes ahead and the others wait for what it meets. Pauses are shortened at random, so
    that many processes do not come back together.

    Args:
        what: name of the store, for messages.
        away: errors by which the store fails.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        what: str,
        away: tuple[type[Exception], ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._away, self._clock = what, away, clock
        self._lock = threading.Lock()
        self._failures = 0
        self._closed_until = 0.0
        self._reason = ""

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """One request: let through or refused, and what came of it noted.

        An answer that cannot be used, a `FeatureStoreError`, is an answer: the store is there. A
        request that ended without having asked gives its turn back; the next may go at once.

        Raises:
            TransientError: the store failed now, or moments ago.
        """
        if self._failures:
            self._check()
        noted = self._failures
        try:
            yield
        except self._away as exc:
            with self._lock:
                self._failures += 1
                self._reason = str(exc) or type(exc).__name__
                self._closed_until = self._clock() + self._pause()
            raise TransientError(
                f"{self._what} could not be read: {self._reason}. Nothing was read; try again when "
                "it is back"
            ) from exc
        except FeatureStoreError:
            self._failures = 0
            raise
        except BaseException:
            with self._lock:
                if self._failures == noted:  # else a failure has set the pause
                    self._closed_until = self._clock()
            raise
        self._failures = 0

    def _check(self) -> None:
        with self._lock:
            remaining = self._closed_until - self._clock()
            if self._failures and remaining > 0:
                raise TransientError(
                    f"{self._what} failed {self._failures} time(s) in a row, last with: "
                    f"{self._reason}. It is not asked for another {remaining:.1f} s. Nothing was "
                    "read"
                )
            self._closed_until = self._clock() + self._pause()  # this request goes ahead, alone

    def _pause(self) -> float:
        doubled = FIRST_PAUSE_S * 2.0 ** min(max(self._failures - 1, 0), 30)
        return min(doubled, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)


class Pool(Generic[Connection]):
    """A bounded set of connections that are lent out one by one, the last used first.

    Args:
        connect: opens a connection.
        disconnect: closes one.
        config: how many there may be, and how long a reader waits for one.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        disconnect: Callable[[Connection], None],
        config: OnlineConfig,
    ) -> None:
        self._connect, self._disconnect, self._config = connect, disconnect, config
        self._free = threading.BoundedSemaphore(config.max_connections)
        self._idle: list[Connection] = []

    @contextmanager
    def lend(self) -> Iterator[Connection]:
        """A connection for one read; one that met an error is closed, not kept.

        Raises:
            TransientError: all are in use, and none came free in time.
        """
        if not self._free.acquire(timeout=self._config.timeout_s):
            raise TransientError(
                f"all {self._config.max_connections} connections to the online store were in use "
                f"for {self._config.timeout_s} s. Nothing was read; try again, or raise "
                "features.online.max_connections"
            )
        try:
            connection = self._idle.pop() if self._idle else self._connect()
            try:
                yield connection
            except BaseException:
                self._disconnect(connection)
                raise
            self._idle.append(connection)
        finally:
            self._free.release()

    def close(self) -> None:
        """Close what is not lent out."""
        while self._idle:
            self._disconnect(self._idle.pop())


class FeastBackend(OnlineBackend):
    """Any online store, through Feast's own `online_read`: right everywhere, fast nowhere.

    One call a view and read, one read at a time, because not every store may be shared by threads.
    The store's own time-outs and errors apply.
    """

    name = "feast"

    def __init__(self, store: FeatureStore, plan: ReadPlan, config: OnlineConfig) -> None:
        super().__init__(store, plan, config)
        self._lock = threading.Lock()

    def fetch(self, keys: Sequence[list[Any]]) -> list[Rows]:
        """See `OnlineBackend`."""
        with self._lock:
            return list(map(self._read_group, self._plan.groups, self._encoders, keys))

    def moment(self, cell: datetime) -> int:
        """See `OnlineBackend`."""
        return micros(cell)

    def _read_group(
        self, group: KeyGroup, check: Callable[[Any], bytes], distinct: list[Any]
    ) -> Rows:
        rows: Rows = [[None] * (len(group.cells) + len(group.views)) for _ in distinct]
        for key in distinct:
            check(key)  # Feast would round 1.5 to the key 1
        entities = [group.entity_key(key) for key in distinct]
        for number, position in enumerate(group.views if distinct else ()):
            view = self._plan.views[position]
            columns = {f.name: i for i, f in enumerate(group.cells) if f.view == position}
            answers = self._store._get_provider().online_read(
                self._store.config, view.definition, entities, list(columns)
            )
            for row, (moment, found) in zip(rows, answers, strict=True):
                if not found:
                    continue
                row[len(group.cells) + number] = moment if micros(moment) else None
                for name in columns.keys() & found.keys():
                    row[columns[name]] = found[name].SerializeToString()
        return rows


def key_values(packed: bytes) -> dict[str, Any]:
    """Join keys and values of a serialized entity key.

    Raises:
        FeatureStoreError: it is none.
    """
    try:
        key = deserialize_entity_key(packed)
    except (struct.error, ValueError, IndexError, TypeError) as exc:
        raise FeatureStoreError(
            f"the online store holds a key that is no entity key of Feast ({exc}). Nothing was "
            "read; remove what it holds of this project and run the feature refresh"
        ) from exc
    values = map(feast_value_type_to_python_type, key.entity_values)
    return dict(zip(key.join_keys, values, strict=True))


def chunks(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    """The items in order, `size` at a time."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
