"""Reach an online store: Redis, SQLite, or any other through Feast's own read.

A back-end fetches cells, undecoded, for all views and keys of a request at once. It holds as many
connections as reads may run at one time, and fails fast while the store is away.
"""

from __future__ import annotations

import itertools
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, Protocol, TypeVar

from feast import FeatureStore
from feast.infra.key_encoding_utils import deserialize_entity_key
from feast.type_map import feast_value_type_to_python_type

from tasks.features.config import OnlineConfig
from tasks.features.online.plan import KeyGroup, ReadPlan
from tasks.kernel.errors import FeatureStoreError, TransientError

Rows = list[Sequence[Any]]
"""For each key its cells: values as `KeyGroup.cells` orders them, then one event time a view."""

Connection = TypeVar("Connection")


class OnlineBackend(Protocol):
    """Where values come from."""

    name: str

    def fetch(self, keys: Sequence[list[Any]]) -> list[Rows]:
        """Cells of the distinct keys of each group of the plan, in their order.

        All cells of one view and key come from one moment of the store.

        Raises:
            TransientError: the store is away or did not answer in time.
        """

    def moment(self, cell: Any) -> int:
        """Microseconds since 1970 of an event time as the store keeps it."""

    def stored_keys(self, view: int, count: int) -> list[dict[str, Any]]:
        """Join keys of up to `count` entities that a view of the plan has stored.

        For checks, not for serving. Empty where the store cannot list its keys.
        """

    def close(self) -> None:
        """Give back every connection."""


class Breaker:
    """Keeps a store that failed from being asked by every request at once.

    After a failure nobody asks for a pause, which doubles with each further failure; then one
    request goes ahead and the others wait for what it meets. Pauses are shortened at random, so
    that many processes do not come back together.

    Args:
        what: name of the store, for the sentence.
        config: first and longest pause.
        clock: monotonic seconds.
    """

    def __init__(
        self, what: str, config: OnlineConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._config, self._clock = what, config, clock
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
            TransientError: the store failed moments ago.
        """
        self.check()
        noted = self._failures
        try:
            yield
        except FeatureStoreError:
            self.succeeded()
            raise
        except BaseException:
            with self._lock:
                if self._failures == noted:  # else `failed` has set the pause
                    self._closed_until = self._clock()
            raise
        self.succeeded()

    def check(self) -> None:
        """Let a request through, or say that the store is away without asking it.

        Raises:
            TransientError: it failed moments ago.
        """
        if not self._failures:
            return
        with self._lock:
            remaining = self._closed_until - self._clock()
            if self._failures and remaining > 0:
                raise TransientError(
                    f"{self._what} failed {self._failures} time(s) in a row, last with: "
                    f"{self._reason}. It is not asked for another {remaining:.1f} s. Nothing was "
                    "read; try again then"
                )
            self._closed_until = self._clock() + self._pause()  # this request goes ahead, alone

    def succeeded(self) -> None:
        """Note that the store answered."""
        if self._failures:
            with self._lock:
                self._failures = 0

    def failed(self, reason: BaseException) -> TransientError:
        """Note that the store failed; return the error to raise."""
        with self._lock:
            self._failures += 1
            self._reason = str(reason) or type(reason).__name__
            self._closed_until = self._clock() + self._pause()
        return TransientError(
            f"{self._what} could not be read: {self._reason}. Nothing was read; try again when it "
            "is back"
        )

    def _pause(self) -> float:
        doubled = self._config.first_pause_s * 2.0 ** min(max(self._failures - 1, 0), 30)
        return min(doubled, self._config.longest_pause_s) * random.uniform(0.5, 1.0)


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
                f"all {self._config.max_connections} connections to the online store are in use "
                f"and none came free within {self._config.timeout_s} s. Nothing was read; try "
                "again, or raise features.online.max_connections"
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


@dataclass
class FeastBackend:
    """Any online store, through Feast's own `online_read`: right everywhere, fast nowhere.

    One call a view and read, one read at a time, because not every store may be shared by threads.
    The store's own time-outs and errors apply.
    """

    store: FeatureStore
    plan: ReadPlan
    name: str = field(default="feast", init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def fetch(self, keys: Sequence[list[Any]]) -> list[Rows]:
        """See `OnlineBackend`."""
        with self._lock:
            return [
                self._read_group(group, distinct)
                for group, distinct in zip(self.plan.groups, keys, strict=True)
            ]

    def moment(self, cell: datetime) -> int:
        """See `OnlineBackend`."""
        return microseconds(cell)

    def stored_keys(self, view: int, count: int) -> list[dict[str, Any]]:
        """Feast's interface has no way to list keys."""
        return []

    def close(self) -> None:
        """The store belongs to the caller."""

    def _read_group(self, group: KeyGroup, distinct: list[Any]) -> Rows:
        check = group.encoder(self.plan.key_version)  # Feast would round 1.5 to the key 1
        for key in distinct:
            check(key)
        entities = [group.entity_key(key) for key in distinct]
        rows: list[list[Any]] = [[] for _ in distinct]
        times: list[list[Any]] = [[] for _ in distinct]
        values: dict[int, list[dict[str, Any]]] = {}
        for position in group.views if distinct else ():
            view = self.plan.views[position]
            answers = self.store._get_provider().online_read(
                self.store.config, view.definition, entities, [f.name for f in view.features]
            )
            values[position] = [found or {} for _, found in answers]
            for row, (moment, found) in zip(times, answers, strict=True):
                row.append(moment if found and microseconds(moment) else None)
        for feature in group.cells if distinct else ():
            for row, found in zip(rows, values[feature.view], strict=True):
                value = found.get(feature.name)
                row.append(None if value is None else value.SerializeToString())
        return [row + time for row, time in zip(rows, times, strict=True)]


def microseconds(moment: datetime) -> int:
    """Microseconds since 1970; a time without a zone is UTC, as in Feast."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    whole = aware - datetime(1970, 1, 1, tzinfo=UTC)
    return (whole.days * 86_400 + whole.seconds) * 1_000_000 + whole.microseconds


def key_values(packed: bytes, version: int) -> dict[str, Any]:
    """Join keys and values of a serialized entity key.

    Raises:
        FeatureStoreError: it is none.
    """
    try:
        key = deserialize_entity_key(packed, version)
    except (struct.error, ValueError, IndexError, TypeError) as exc:
        raise FeatureStoreError(
            f"the online store holds a key that is no entity key of Feast ({exc}); it is damaged, "
            "or something else writes to it. Nothing was read; remove what it holds of this "
            "project and run the feature refresh, which fills it again"
        ) from exc
    values = map(feast_value_type_to_python_type, key.entity_values)
    return dict(zip(key.join_keys, values, strict=True))


def chunks(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    """The items in order, `size` at a time."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
