from pathlib import Path

import pytest

from tasks.lineage.journal import Journal, LineageSettings


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(LineageSettings(folder=tmp_path / "lineage", namespace="flights"))
