from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tasks.kernel.settings import ArtifactStore
from tasks.registry.candidate import flatten, pin_tags
from tests.support.reporting.run_records import run_record

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


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


@given(st.dictionaries(st.text(max_size=8), json_values, max_size=4))
def test_every_parameter_name_is_one_that_mlflow_takes(config: dict[str, object]) -> None:
    assert all(re.fullmatch(r"[\w.\-/: ]*", name) for name in flatten(config))


def test_a_registered_version_says_what_its_snapshot_pins(tmp_path: Path) -> None:
    snapshot = run_record(ArtifactStore(tmp_path)).dataset.snapshot
    tags = pin_tags(snapshot)
    assert tags["feature_service_version"] == "2"
    assert tags["tables_version"] == snapshot.tables_version
    assert tags["feature_view.route_stats"] == f"v1 {'c3' * 32}"
    assert pin_tags(snapshot.model_copy(update={"pins": None})) == {}
