"""The bench of online reads measures the right thing: the values of all three ways are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.config import read_pipeline_config
from infra.bench import online_read
from tasks.settings import Settings
from tests.support.data.installation import Installation
from tests.support.data.repository import SmallRepository, days

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")


def test_reads_are_timed_on_equal_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online_read, "ROUNDS", 4)
    repository = SmallRepository(tmp_path, num_days=2)
    installation = Installation(tmp_path / "home", repository)
    tables = installation.refresh(days(0, 2))
    installation.materialize(tables, days(0, 2))
    installation.publish(tables)
    settings = Settings.from_environment(
        {"FALAJ_HOME": str(installation.home), "FALAJ_FEATURE_REPO": str(repository.path)}
    )
    one, hundred = online_read.compare_online_reads(read_pipeline_config(repository.path), settings)
    assert (one.num_entities, hundred.num_entities) == (1, 100)
    assert one.num_features == hundred.num_features == 69
    assert one.num_differing == hundred.num_differing == 0
    assert min(one.ours_ms, one.raw_ms, one.feast_ms, hundred.ours_ms, hundred.raw_ms) > 0
