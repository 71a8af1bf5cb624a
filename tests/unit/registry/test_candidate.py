from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from tasks.registry.candidate import flatten

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
