import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import r2_score, roc_auc_score

from tasks.contracts.data import TaskKind
from tasks.conversion.kinds.interface import LabelledRows, paired_change
from tasks.conversion.kinds.tabular import category_rows, edge_rows, read_rows, tabular_inputs
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
    typical = tabular_inputs(*COLUMNS.model_inputs(data.iloc[100:]))
    rows = category_rows(typical, dataset(store, data), COLUMNS, store)
    codes = tabular_inputs(*COLUMNS.model_inputs(data))["categorical"]
    for position in range(len(COLUMNS.categorical)):
        assert set(rows["categorical"][:, position]) == set(codes[:, position])


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
