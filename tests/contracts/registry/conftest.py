"""An installation with an MLflow database whose schema migrations ran once."""

from pathlib import Path

import pytest

from tasks.registry import pictures
from tests.support.registry import builders
from tests.support.registry.builders import World, migrated

__all__ = ["migrated"]  # a fixture


@pytest.fixture
def world(tmp_path: Path, migrated: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """An installation in a folder whose name must be quoted in an address, quick at drawing.

    It is that of all commands of this process.
    """
    monkeypatch.setattr(pictures, "draw_pictures", builders.draw_nothing)
    for name in ("FALAJ_DATABASE_URL", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    world = World.at(tmp_path / "a home#1").with_database_of(migrated)
    monkeypatch.setenv("FALAJ_HOME", str(world.home))
    return world
