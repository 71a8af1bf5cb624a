from __future__ import annotations

from pathlib import Path

from tasks.kernel.settings import ArtifactStore
from tasks.registry.candidate import flatten, pin_tags
from tests.support.reporting.run_records import run_record


def test_a_nested_configuration_becomes_flat_parameters() -> None:
    config = {
        "num_ranks": 2,
        "optimizer": {"name": "adamw", "betas": [0.9, 0.99], "schedule": {"warm-up": None}},
        "extra": {},
    }

    assert flatten(config) == {
        "num_ranks": "2",
        "optimizer.name": "adamw",
        "optimizer.betas": "[0.9, 0.99]",
        "optimizer.schedule.warm-up": "null",
        "extra": "{}",
    }


def test_a_registered_version_says_what_its_snapshot_pins(tmp_path: Path) -> None:
    snapshot = run_record(ArtifactStore(tmp_path)).dataset.snapshot
    tags = pin_tags(snapshot)
    assert tags["feature_service_version"] == "2"
    assert tags["tables_version"] == snapshot.tables_version
    assert tags["feature_view.route_stats"] == f"v1 {'c3' * 32}"
    assert pin_tags(snapshot.model_copy(update={"pins": None})) == {}
