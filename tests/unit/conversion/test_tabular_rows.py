from __future__ import annotations

import numpy as np
import pytest

from tasks.conversion.inputs import ModelInputs
from tasks.conversion.kinds.tabular_rows import (
    category_rows,
    edge_rows,
    magnitude_rows,
    read_categories,
    read_rows,
    tabular_inputs,
)
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore
from tests.support.data.builders import COLUMNS, dataset, frame, month


def test_the_rows_of_a_window_are_those_in_it_and_in_order(store: ArtifactStore) -> None:
    data = frame()
    rows = read_rows(dataset(store, data), COLUMNS, month(9, 4), store)
    inside = data[data[COLUMNS.event_time] >= month(9).start]
    codes, numbers = COLUMNS.model_inputs(inside)
    np.testing.assert_array_equal(rows.inputs["categorical"], codes)
    np.testing.assert_array_equal(rows.inputs["numeric"], numbers)
    np.testing.assert_array_equal(rows.labels, inside[COLUMNS.label] == 1)
    assert rows.days.min() == np.datetime64("2013-09-01")
    assert rows.days.max() == np.datetime64("2013-12-31")


def test_a_row_at_the_end_of_a_window_is_outside(store: ArtifactStore) -> None:
    data = frame(50)
    data.loc[30, COLUMNS.event_time] = month(9).start
    data.loc[31, COLUMNS.event_time] = month(10).start
    data = data.iloc[[30, 31]]
    assert read_rows(dataset(store, data), COLUMNS, month(9), store).inputs.num_rows == 1


def test_a_sample_is_seeded_and_smaller(store: ArtifactStore) -> None:
    rows = dataset(store)
    one, same, other = (
        read_rows(rows, COLUMNS, month(1, 6), store, limit=100, seed=seed).inputs["numeric"]
        for seed in (1, 1, 2)
    )
    assert len(one) == 100
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other, equal_nan=True)


def test_a_window_without_rows_is_refused(store: ArtifactStore) -> None:
    rows = dataset(store, frame(50).iloc[:5])
    with pytest.raises(DataContractError, match="has no row in 2013-09-01"):
        read_rows(rows, COLUMNS, month(9), store)


def test_edge_rows_hold_what_data_rarely_does_and_leave_the_typical_rows_alone() -> None:
    typical = tabular_inputs(*COLUMNS.model_inputs(frame(10)))
    before = typical["numeric"].copy()
    edges = edge_rows(typical, 64, seed=0)
    assert edges.num_rows == 64
    assert np.isnan(edges["numeric"][0]).all()
    assert (edges["numeric"][1] > 1e29).all()
    assert (edges["numeric"][2] < -1e29).all()
    assert not np.isin(edges["categorical"][4], typical["categorical"]).any()
    np.testing.assert_array_equal(typical["numeric"], before)


def test_blocks_hold_every_row_once() -> None:
    inputs = tabular_inputs(*COLUMNS.model_inputs(frame(70)))
    assert [block.num_rows for block in inputs.blocks(32)] == [32, 32, 6]
    assert inputs.repeated(150)["numeric"].shape == (150, 5)


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(DataContractError, match="the same number in each array"):
        ModelInputs({"a": np.zeros((2, 1)), "b": np.zeros((3, 1))})


def test_every_category_of_the_snapshot_is_among_the_edge_rows(store: ArtifactStore) -> None:
    data = frame(200)
    data.loc[0, "carrier"] = "seen once, in training"
    data.loc[1, "dest"] = None
    codes = read_categories(dataset(store, data), COLUMNS, store)
    inputs = tabular_inputs(*COLUMNS.model_inputs(data))
    rows = category_rows(tabular_inputs(*COLUMNS.model_inputs(data.iloc[100:])), codes)
    assert rows.num_rows == max(len(column) for column in codes)
    for position in range(len(COLUMNS.categorical)):
        expected = set(inputs["categorical"][:, position].tolist())
        assert set(rows["categorical"][:, position].tolist()) == expected
        assert set(codes[position].tolist()) == expected


def test_some_numbers_are_far_from_what_they_use_to_be_and_most_are_not() -> None:
    typical = tabular_inputs(*COLUMNS.model_inputs(frame(400)))
    before = typical["numeric"].copy()
    rows = magnitude_rows(typical, 400, seed=0)
    other = rows["numeric"] != before
    other &= np.isfinite(before)
    assert 0.1 < other.mean() < 0.4
    factors = np.abs(rows["numeric"][other] / before[other])
    factors = factors[np.isfinite(factors) & (factors > 0)]
    assert factors.min() < 0.01
    assert 1e4 < factors.max() < 2e6
    np.testing.assert_array_equal(typical["numeric"], before)
    np.testing.assert_array_equal(magnitude_rows(typical, 400, seed=0)["numeric"], rows["numeric"])
