"""Opening the feature store of a state folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tasks.features.access.store import open_store
from tasks.features.config import recorded_config
from tasks.kernel.errors import FeatureStoreError
from tests.support.data.repository import SmallRepository

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:feast")


def test_a_damaged_registry_is_named_and_can_be_removed(tmp_path: Path) -> None:
    repo = SmallRepository(tmp_path, num_days=1).path
    registry = tmp_path / "home" / "feast" / "registry.db"
    registry.parent.mkdir(parents=True)
    registry.write_bytes(b"no database" * 1000)
    with pytest.raises(FeatureStoreError, match=f"the registry {registry} cannot.*remove this"):
        open_store(tmp_path / "home", repo)
    shutil.rmtree(registry.parent)
    assert open_store(tmp_path / "home", repo).list_feature_views() == []


def test_the_configuration_that_an_earlier_version_kept_with_a_snapshot_is_read(
    tmp_path: Path,
) -> None:
    config = SmallRepository(tmp_path, num_days=1).config
    kept = config.model_dump(mode="json")
    kept |= {"skew": {"max_differing_share": 0.0}, "threads": 4}
    kept |= {"parity": {"seed": 3}, "memory_limit_mb": 1000}
    kept["training_set"]["event_time"] = "event_timestamp"
    kept["online"] |= {"first_pause_s": 0.5, "age_bounds_s": [60, 300]}
    assert recorded_config(json.dumps(kept)) == config
