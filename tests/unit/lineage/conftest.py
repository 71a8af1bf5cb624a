from __future__ import annotations

from pathlib import Path

import pytest

from tasks.kernel.settings import ArtifactStore
from tasks.lineage.journal import Journal, LineageSettings


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(LineageSettings(folder=tmp_path / "lineage", namespace="flights"))
