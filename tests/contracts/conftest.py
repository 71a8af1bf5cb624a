"""A state folder of its own for each test of flows and commands."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH, temporary_settings

from tasks.kernel.settings import Settings


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Of an empty state folder, which all that runs in this process uses."""
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FALAJ_DATABASE_URL", raising=False)
    with temporary_settings({PREFECT_LOCAL_STORAGE_PATH: str(tmp_path / "results")}):
        yield Settings.from_environment()
