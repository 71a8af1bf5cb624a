from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from sklearn.metrics import r2_score

from tasks.contracts.evaluation import Metric
from tasks.conversion.config import QualityBound
from tasks.conversion.gates.examination import quality_failure
from tasks.conversion.gates.parity import ScoreGap, parity_failure, score_gap
from tasks.conversion.kinds.tabular import WORDING, score_distances
from tasks.conversion.kinds.tabular_metric import PairedAuc, PairedR2, paired_quality
from tasks.conversion.kinds.tabular_rows import LabelledRows, tabular_inputs
from tasks.kernel.errors import DataContractError

BOUND = QualityBound(max_gap=0.05, mean_gap=0.005, quality_drop=0.001)


def rows(labels: np.ndarray, days: np.ndarray) -> LabelledRows:
    nothing = np.empty((len(labels), 0))
    none = tabular_inputs(nothing.astype(np.int32), nothing.astype(np.float32))
    return LabelledRows(none, labels, np.datetime64("2018-04-01") + days)


def test_the_change_of_r2_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(2)
    labels, days = rng.normal(3000, 900, 600), np.repeat(np.arange(30), 20)
    source = (labels + rng.normal(0, 300, 600)).astype(np.float32)
    variant = (source + rng.normal(0, 90, 600)).astype(np.float32)
    change = PairedR2(rows(labels, days), 200, seed=0).change(source, variant)
    expected = r2_score(labels, variant.astype(float)) - r2_score(labels, source.astype(float))
    assert change.value == pytest.approx(expected, rel=1e-6)
    assert change.low < change.value < change.high < 0


def test_equal_predictions_change_nothing_for_certain() -> None:
    labels = np.arange(40, dtype=float)
    same = labels.astype(np.float32)
    change = PairedR2(rows(labels, np.arange(40) // 4), 50, seed=1).change(same, same)
    assert change == Metric(value=0.0, low=0.0, high=0.0)


def test_the_task_names_its_metric() -> None:
    days = np.arange(8) // 2
    number = rows(np.arange(8.0), days)
    label = rows(np.arange(8) % 2 == 1, days)
    assert isinstance(paired_quality("regression", number, 10, 0), PairedR2)
    assert isinstance(paired_quality("classification", label, 10, 0), PairedAuc)


def test_labels_that_are_all_equal_are_refused() -> None:
    with pytest.raises(DataContractError, match="label 7 in all of 5 rows"):
        PairedR2(rows(np.full(5, 7.0), np.arange(5)), 10, seed=0)


def test_gaps_are_in_standard_deviations_of_the_label() -> None:
    source = np.array([1000.0, 2000.0], dtype=np.float32)
    variant = source + np.array([0, 100], dtype=np.float32)
    gap = score_gap(source, variant, partial(score_distances, unit=2000.0))
    assert (gap.largest, gap.mean) == pytest.approx((0.05, 0.025))
    small = ScoreGap(0.001, 0.0001, 2)
    bound = BOUND.model_copy(update={"max_gap": 0.01})
    failure = parity_failure(gap, small, small, bound, WORDING["regression"])
    assert failure is not None
    assert "a prediction differs by 0.05 standard deviations" in failure


def test_a_loss_of_r2_is_called_so() -> None:
    failure = quality_failure(Metric(value=-0.01, low=-0.02, high=0.0), BOUND, "R²")
    assert failure is not None
    assert failure.startswith("R² changes by -0.01")
