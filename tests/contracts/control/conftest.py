"""A metadata database for each test, of SQLite and of a real PostgreSQL."""

from pathlib import Path

import pytest

from tests.support.services.servers import new_database


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Address of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'operation' / 'operation.db'}"
    return new_database(request.getfixturevalue("postgres"))
