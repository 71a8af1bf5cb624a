from __future__ import annotations

import numpy as np
import pytest

from tasks.conversion.rows import ModelInputs, edge_rows, read_rows
from tasks.errors import DataContractError
from tasks.settings import ArtifactStore
from tests.builders import COLUMNS, dataset, frame, month


def test_the_rows_of_a_window_are_those_in_it_and_in_order(store: ArtifactStore) -> None:
    data = frame()
    rows = read_rows(dataset(store, data), COLUMNS, month(9, 4), store)
    inside = data[data[COLUMNS.event_time] >= month(9).start]
    codes, numbers = COLUMNS.model_inputs(inside)
    np.testing.assert_array_equal(rows.inputs.categorical, codes)
    np.testing.assert_array_equal(rows.inputs.numeric, numbers)
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
        read_rows(rows, COLUMNS, month(1, 6), store, limit=100, seed=seed).inputs.numeric
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
    typical = ModelInputs(*COLUMNS.model_inputs(frame(10)))
    before = typical.numeric.copy()
    edges = edge_rows(typical, 64, seed=0)
    assert edges.num_rows == 64
    assert np.isnan(edges.numeric[0]).all()
    assert (edges.numeric[1] > 1e29).all()
    assert (edges.numeric[2] < -1e29).all()
    assert not np.isin(edges.categorical[4], typical.categorical).any()
    np.testing.assert_array_equal(typical.numeric, before)


def test_blocks_hold_every_row_once() -> None:
    inputs = ModelInputs(*COLUMNS.model_inputs(frame(70)))
    assert [block.num_rows for block in inputs.blocks(32)] == [32, 32, 6]
    assert inputs.repeated(150).numeric.shape == (150, 5)
