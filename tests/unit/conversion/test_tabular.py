from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import r2_score, roc_auc_score

from tasks.contracts.data import TaskKind
from tasks.conversion.config import QualityBound
from tasks.conversion.examine import parity_failure, score_gap
from tasks.conversion.kinds.interface import LabelledRows, paired_change
from tasks.conversion.kinds.tabular import (
    UNIT,
    category_rows,
    edge_rows,
    read_categories,
    read_rows,
    score_distances,
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


def test_edge_rows_hold_what_data_rarely_does_and_leave_the_typical_rows_alone() -> None:
    typical = tabular_inputs(*COLUMNS.model_inputs(frame(10)))
    before = typical["numeric"].copy()
    edges = edge_rows(typical, 64)
    assert edges.num_rows == 64
    assert np.isnan(edges["numeric"][0]).all()
    assert (edges["numeric"][1] > 1e29).all()
    assert (edges["numeric"][2] < -1e29).all()
    assert not np.isin(edges["categorical"][4], typical["categorical"]).any()
    np.testing.assert_array_equal(typical["numeric"], before)


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


def labelled(labels: np.ndarray, days: np.ndarray) -> LabelledRows:
    nothing = tabular_inputs(np.empty((len(labels), 0), np.int32), np.empty((len(labels), 0)))
    return LabelledRows(nothing, labels, np.datetime64("2013-09-01") + days)


@given(seed=st.integers(0, 10_000), decimals=st.integers(0, 3))
@settings(max_examples=30)
def test_the_change_is_that_of_sklearn_ties_included(seed: int, decimals: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.random(200) < 0.3
    labels[:2] = [True, False]
    rows = labelled(labels, rng.integers(0, 7, 200))
    source, variant = (np.round(rng.random(200) + labels * 0.2, decimals) for _ in range(2))
    change = paired_change("classification", rows)(source, variant)
    expected = roc_auc_score(labels, variant) - roc_auc_score(labels, source)
    assert change.value == pytest.approx(expected, abs=1e-12)
    assert change.low <= change.high


def test_the_change_of_r2_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(2)
    labels, days = rng.normal(3000, 900, 600), np.repeat(np.arange(30), 20)
    source = (labels + rng.normal(0, 300, 600)).astype(np.float32)
    variant = (source + rng.normal(0, 90, 600)).astype(np.float32)
    change = paired_change("regression", labelled(labels, days))(source, variant)
    expected = r2_score(labels, variant.astype(float)) - r2_score(labels, source.astype(float))
    assert change.value == pytest.approx(expected, rel=1e-6)
    assert change.low < change.value < change.high < 0


def test_a_clear_loss_has_an_interval_below_zero_and_is_reproducible() -> None:
    rng = np.random.default_rng(2)
    labels = rng.random(2000) < 0.3
    rows = labelled(labels, rng.integers(0, 60, 2000))
    source = labels + rng.normal(size=2000)
    variant = labels * 0.1 + rng.normal(size=2000)
    one, same = (paired_change("classification", rows)(source, variant) for _ in range(2))
    assert one == same
    assert one.low < one.value < one.high < -0.1


@pytest.mark.parametrize("days", [[0, 0, 0, 0], [0, 0, 1, 1]], ids=["one", "of-one-label-each"])
def test_days_that_cannot_be_drawn_leave_the_value_as_its_interval(days: list[int]) -> None:
    labels = np.array([True, True, False, False])
    change = paired_change("classification", labelled(labels, np.array(days)))
    found = change(np.array([0.9, 0.8, 0.1, 0.2]), np.zeros(4))
    assert (found.value, found.low, found.high) == (-0.5, -0.5, -0.5)


@pytest.mark.parametrize(
    ("task", "label"), [("classification", True), ("classification", False), ("regression", 7.0)]
)
def test_one_label_alone_cannot_judge(task: TaskKind, label: float) -> None:
    with pytest.raises(DataContractError, match="expected labels that differ"):
        paired_change(task, labelled(np.full(5, label), np.arange(5)))


BOUND = QualityBound(max_gap=0.05, mean_gap=0.005, quality_drop=0.001)


def test_gaps_are_in_standard_deviations_of_the_label() -> None:
    source = np.array([1000.0, 2000.0], dtype=np.float32)
    variant = source + np.array([0, 100], dtype=np.float32)
    gap = score_gap(source, variant, partial(score_distances, unit=2000.0))
    assert (gap.largest, gap.mean) == pytest.approx((0.05, 0.025))
    bound = BOUND.model_copy(update={"max_gap": 0.01})
    failure = parity_failure({"test": gap}, bound, UNIT)
    assert failure is not None
    assert "an answer differs by 0.05 standard deviations" in failure
