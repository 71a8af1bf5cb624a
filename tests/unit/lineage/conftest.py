from __future__ import annotations

from pathlib import Path

import pytest

from tasks.kernel.settings import ArtifactStore
from tasks.lineage.config import LineageSettings


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture
def settings(tmp_path: Path) -> LineageSettings:
    return LineageSettings(folder=tmp_path / "lineage", namespace="flights", owner="team:flights")
