"""A feature store of three days with real flights, online up to a full hour."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.serving.entity_stores import Serving, made


class Stores:
    """Installations by the kind of their online store, each made once and changed by nobody."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._made: dict[str, Serving] = {}

    def of(self, kind: str) -> Serving:
        if kind not in self._made:
            self._made[kind] = made(kind, self._folder / kind, self._stack)
        return self._made[kind]


@pytest.fixture(scope="package")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    with ExitStack() as stack:
        yield Stores(tmp_path_factory.mktemp("stores"), stack)


@pytest.fixture(scope="package", params=["sqlite", "redis"])
def serving(request: pytest.FixtureRequest, stores: Stores) -> Serving:
    return stores.of(request.param)


@pytest.fixture
def on_sqlite(stores: Stores) -> Serving:
    return stores.of("sqlite")


@pytest.fixture
def on_redis(stores: Stores) -> Serving:
    return stores.of("redis")
