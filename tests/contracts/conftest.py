"""A state folder of its own for each test of flows and commands; a PostgreSQL for all."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH, temporary_settings

from tasks.kernel.settings import Settings
from tests.support.data.profiles import Servers, servers
from tests.support.services.servers import postgres_server


@pytest.fixture(scope="package")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URI of a server; a test makes a database of its own there."""
    with postgres_server(tmp_path_factory.mktemp("postgres")) as uri:
        yield uri


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A Redis and a PostgreSQL server for a module."""
    with servers(tmp_path_factory.mktemp("servers")) as started:
        yield started


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Of an empty state folder, which all that runs in this process uses."""
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FALAJ_DATABASE_URL", raising=False)
    with temporary_settings({PREFECT_LOCAL_STORAGE_PATH: str(tmp_path / "results")}):
        yield Settings.from_environment()
