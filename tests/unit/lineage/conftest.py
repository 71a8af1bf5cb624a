from __future__ import annotations

from pathlib import Path

import pytest

from tasks.lineage.config import LineageSettings
from tasks.settings import ArtifactStore


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture
def settings(tmp_path: Path) -> LineageSettings:
    return LineageSettings(folder=tmp_path / "lineage", namespace="flights", owner="team:flights")
