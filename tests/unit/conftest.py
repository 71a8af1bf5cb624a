"""Fixtures of the unit tests."""

from pathlib import Path

import pytest

from tasks.kernel.settings import ArtifactStore


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    """An empty artifact store."""
    return ArtifactStore(tmp_path / "artifacts")
