"""A metadata database for each test, of SQLite and of a real PostgreSQL."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.services.servers import new_database, postgres_server


@pytest.fixture(scope="package")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with postgres_server(tmp_path_factory.mktemp("postgres")) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Address of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'operation' / 'operation.db'}"
    return new_database(request.getfixturevalue("postgres"))
