"""One Redis server, and refreshed feature tables that tests only read, for the whole folder."""

from collections.abc import Iterator

import pytest

from tests.support.data.installation import Installation, Refreshed
from tests.support.data.repository import days
from tests.support.services.servers import RedisServer, redis_server


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="package")
def three_days(tmp_path_factory: pytest.TempPathFactory) -> Refreshed:
    installation = Installation.at(tmp_path_factory.mktemp("three"), num_days=3)
    return installation, installation.refresh(days(0, 3))


@pytest.fixture(scope="package")
def ten_days(tmp_path_factory: pytest.TempPathFactory) -> Refreshed:
    installation = Installation.at(tmp_path_factory.mktemp("ten"), num_days=10)
    return installation, installation.refresh(days(0, 10))
