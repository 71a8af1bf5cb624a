"""Columns as model inputs: the same numbers that training made of the same rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import BadRequestError
from serving.features.recipe import build_inputs
from tasks.contracts.data import DatasetSchema

SCHEMA = DatasetSchema(
    row_id="id",
    event_time="at",
    label="y",
    categorical=("kind", "place"),
    numeric=("size", "weight", "count"),
)
ROW = st.fixed_dictionaries(
    {
        "kind": st.none() | st.text(max_size=5),
        "place": st.none() | st.sampled_from(["", "a", "é", "A A"]),
        "size": st.none() | st.floats(width=32),
        "weight": st.none() | st.floats(),
        "count": st.none() | st.integers(-(2**40), 2**40),
    }
)


@given(rows=st.lists(ROW, min_size=1, max_size=6))
def test_inputs_are_those_that_training_makes_of_the_same_rows(rows: list[dict[str, Any]]) -> None:
    frame = pd.DataFrame(
        {
            "kind": pd.Series([r["kind"] for r in rows], dtype=object),
            "place": pd.Series([r["place"] for r in rows], dtype=object),
            "size": pd.array([r["size"] for r in rows], dtype="Float32"),
            "weight": np.array([np.nan if r["weight"] is None else r["weight"] for r in rows]),
            "count": pd.array([r["count"] for r in rows], dtype="Int64"),
        }
    )
    with np.errstate(over="ignore"):
        categorical, numeric = SCHEMA.model_inputs(frame)
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    columns["size"] = frame["size"].to_numpy(np.float32, na_value=np.nan)
    made = build_inputs(SCHEMA, columns, len(rows))
    np.testing.assert_array_equal(made["categorical"], categorical)
    np.testing.assert_array_equal(made["numeric"], numeric)
    assert made["categorical"].dtype == np.int32
    assert made["numeric"].dtype == np.float32


@pytest.mark.parametrize("bad", ["7", [1.0], {"a": 1}, b"7"])
def test_what_is_no_number_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(BadRequestError, match=r"column size holds .*, expected a number"):
        build_inputs(SCHEMA, {"size": [1.0, bad]}, 2)
