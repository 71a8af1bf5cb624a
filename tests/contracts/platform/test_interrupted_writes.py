"""Online stores under a writer that is killed, with readers that go on all the time.

`FALAJ_KILLS=50` makes a longer drill of it.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.protos.feast.types.Value_pb2 import Value

from tasks.features.online.redis_store import NewerWinsRedisOnlineStore
from tasks.features.online.sqlite_store import NewerWinsSqliteOnlineStore
from tests.support.data.version_writer import (
    FEATURES,
    NUM_KEYS,
    versioned_config,
    versioned_view,
    write_version,
)
from tests.support.host.killed import KilledWriter, killed_writer
from tests.support.host.processes import wait_until
from tests.support.services.servers import redis_server
from tests.support.suite.promises import Promise, proves

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")

KILLS = int(os.environ.get("FALAJ_KILLS", "3"))
STORES = {"redis": NewerWinsRedisOnlineStore, "sqlite": NewerWinsSqliteOnlineStore}


@pytest.fixture(params=STORES)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A store that holds version 0 of the view: its kind and its address."""
    if request.param == "redis":
        with redis_server(tmp_path) as server:
            write_version("redis", versioned_config("redis", server.connection_string), 0)
            yield "redis", server.connection_string
        return
    address = str(tmp_path / "online.db")
    store, config = NewerWinsSqliteOnlineStore(), versioned_config("sqlite", address)
    store.update(config, [], [versioned_view()], [], [], False)
    write_version("sqlite", config, 0)
    yield "sqlite", address
    store._get_conn(config).close()


@pytest.fixture(scope="module")
def writer() -> Iterator[KilledWriter]:
    with killed_writer("tests.support.data.version_writer") as writer:
        yield writer


class Readers:
    """Threads that read random entities all the time and note what must not be."""

    def __init__(self, target: tuple[str, str]) -> None:
        kind, address = target
        self.faults: list[str] = []
        self.num_reads = 0
        self._newest: dict[int, int] = {}
        self._stop = threading.Event()
        self._config = versioned_config(kind, address)
        self._make = STORES[kind]
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Readers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        draw, view, store = random.Random(1), versioned_view(), self._make()
        while not self._stop.wait(0.002):
            numbers = [draw.randrange(NUM_KEYS) for _ in range(5)]
            try:
                answers = store.online_read(self._config, view, list(map(key, numbers)))
            except Exception as exc:  # any failure of a reader is what the test looks for
                self.faults.append(repr(exc))
                break
            for number, (_, values) in zip(numbers, answers, strict=True):
                self._check(number, values)
            self.num_reads += 1
        close(store, self._config)

    def _check(self, number: int, values: dict[str, Value] | None) -> None:
        found = {value.int64_val for value in (values or {}).values()}
        if len(values or {}) < len(FEATURES) or len(found) != 1:
            self.faults.append(f"entity {number} is torn: {values}")
            return
        (version,) = found
        if version < self._newest.get(number, 0):
            self.faults.append(f"entity {number} went from {self._newest[number]} to {version}")
        self._newest[number] = version


def close(store: Any, config: Any) -> None:
    is_redis = isinstance(store, NewerWinsRedisOnlineStore)
    (store._get_client(config.online_store) if is_redis else store._get_conn(config)).close()


def key(number: int) -> EntityKey:
    return EntityKey(join_keys=["number"], entity_values=[Value(int64_val=number)])


def all_versions(target: tuple[str, str]) -> set[int]:
    """Values of all features of all entities."""
    kind, address = target
    config, view = versioned_config(kind, address), versioned_view()
    store: Any = STORES[kind]()
    answers = store.online_read(config, view, [key(number) for number in range(NUM_KEYS)])
    close(store, config)
    assert all(values and len(values) == len(FEATURES) for _, values in answers)
    return {value.int64_val for _, values in answers for value in values.values()}


@pytest.mark.slow
@proves(Promise.INTERRUPT, "no reader saw half an entity; the next write completes")
def test_readers_see_whole_entities_whenever_the_writer_is_killed(
    target: tuple[str, str], writer: KilledWriter
) -> None:
    draw = random.Random(os.environ.get("FALAJ_KILLS_SEED", "0"))
    first = 1
    with Readers(target) as readers:
        for _ in range(KILLS):
            num_whole, further_s = draw.randrange(1, 4), draw.uniform(0, 0.1)
            reported = writer.write_and_be_killed(
                first, *target, num_whole=num_whole, further_s=further_s
            )
            first = reported + 1
        wait_until(lambda: readers.num_reads > 10, "readers have read")
    assert readers.faults == []
    final = 10 * first + 100_000
    assert write_version(target[0], versioned_config(*target), final) == NUM_KEYS
    assert all_versions(target) == {final}
