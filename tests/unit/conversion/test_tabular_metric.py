from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from tasks.conversion.kinds.tabular_metric import PairedAuc
from tasks.conversion.kinds.tabular_rows import LabelledRows, tabular_inputs
from tasks.kernel.errors import DataContractError

Case = tuple[LabelledRows, np.ndarray, np.random.Generator]


def _rows(labels: np.ndarray, days: np.ndarray) -> LabelledRows:
    nothing = tabular_inputs(np.empty((len(labels), 0), np.int32), np.empty((len(labels), 0)))
    return LabelledRows(nothing, labels.astype(bool), np.datetime64("2013-09-01") + days)


def _random_case(seed: int, num_rows: int = 200, num_days: int = 7) -> Case:
    rng = np.random.default_rng(seed)
    labels = rng.random(num_rows) < 0.3
    labels[:2] = [True, False]
    return _rows(labels, rng.integers(0, num_days, num_rows)), labels, rng


@given(seed=st.integers(0, 10_000), decimals=st.integers(0, 3))
def test_the_change_is_that_of_sklearn_ties_included(seed: int, decimals: int) -> None:
    rows, labels, rng = _random_case(seed)
    source, variant = (np.round(rng.random(200) + labels * 0.2, decimals) for _ in range(2))
    change = PairedAuc(rows, replicates=20, seed=0).change(source, variant)
    expected = roc_auc_score(labels, variant) - roc_auc_score(labels, source)
    assert change.value == pytest.approx(expected, abs=1e-12)
    assert change.low <= change.high


def test_replicates_are_those_of_repeating_the_rows_of_drawn_days() -> None:
    rows, labels, rng = _random_case(3)
    scores = np.round(rng.random(200), 1)
    paired = PairedAuc(rows, replicates=12, seed=5)
    days = np.unique(rows.days)
    for replicate, weights in enumerate(paired._weights):
        repeated = np.repeat(np.arange(200), weights[np.searchsorted(days, rows.days)].astype(int))
        expected = roc_auc_score(labels[repeated], scores[repeated])
        assert paired._replicates(scores)[replicate] == pytest.approx(expected, abs=1e-12)


def test_equal_scores_change_nothing() -> None:
    rows, _, rng = _random_case(1)
    scores = rng.random(200)
    change = PairedAuc(rows, replicates=50, seed=0).change(scores, scores)
    assert (change.value, change.low, change.high) == (0.0, 0.0, 0.0)


def test_a_clear_loss_has_an_interval_below_zero_and_is_reproducible() -> None:
    rows, labels, rng = _random_case(2, num_rows=2000, num_days=60)
    source = labels + rng.normal(size=2000)
    variant = labels * 0.1 + rng.normal(size=2000)
    one, same = (PairedAuc(rows, 200, seed=1).change(source, variant) for _ in range(2))
    assert one == same
    assert one.low < one.value < one.high < -0.1


def test_a_single_day_has_no_interval() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(30) % 3 == 0
    rows = _rows(labels, np.zeros(30, int))
    change = PairedAuc(rows, 50, seed=0).change(rng.random(30), labels + rng.random(30))
    assert change.low == change.value == change.high


def test_days_without_one_of_the_labels_do_not_break_the_interval() -> None:
    labels = np.array([True, True, False, False])
    rows = _rows(labels, np.array([0, 0, 1, 1]))  # a draw of one day twice has one label only
    change = PairedAuc(rows, 50, seed=0).change(np.array([0.9, 0.8, 0.1, 0.2]), np.zeros(4))
    assert (change.value, change.low, change.high) == (-0.5, -0.5, -0.5)


@pytest.mark.parametrize("label", [True, False])
def test_one_label_alone_cannot_judge(label: bool) -> None:
    with pytest.raises(DataContractError, match="AUC is undefined; expected both labels"):
        PairedAuc(_rows(np.full(5, label), np.arange(5)), 10, seed=0)
