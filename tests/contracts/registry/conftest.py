"""An installation with an MLflow database whose schema migrations ran once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.registry import pictures
from tasks.registry.connection import RegistryLocation, prepare_database
from tests.support.registry import builders
from tests.support.registry.builders import World


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database; its schema migrations run once."""
    home = tmp_path_factory.mktemp("mlflow")
    prepare_database(RegistryLocation(f"sqlite:///{home / 'mlflow.db'}", home / "files"))
    return home / "mlflow.db"


@pytest.fixture
def world(tmp_path: Path, migrated: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """An installation in a folder whose name must be quoted in an address, quick at drawing."""
    monkeypatch.setattr(pictures, "draw_pictures", builders.draw_nothing)
    return World.at(tmp_path / "a home#1").with_database_of(migrated)
