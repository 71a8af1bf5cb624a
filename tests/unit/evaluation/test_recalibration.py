"""A fitted map, against scikit-learn and what made the data; whether it helped."""

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import expit
from sklearn.calibration import _SigmoidCalibration
from sklearn.linear_model import LinearRegression

from tasks.contracts.base import TimeWindow
from tasks.contracts.evaluation import (
    Comparison,
    EvaluationReport,
    Metric,
    PairedComparison,
    RegressionComparison,
)
from tasks.evaluation.config import RecalibrationConfig
from tasks.evaluation.recalibration import fit_line, fit_map, fit_platt, why_no_gain
from tasks.kernel.settings import ArtifactStore
from tests.support.data.builders import dataset, frame, metric
from tests.support.registry.builders import evaluation, trained_model

WINDOW = TimeWindow(start=datetime(2026, 1, 1, tzinfo=UTC), end=datetime(2026, 1, 15, tzinfo=UTC))
CONFIG = RecalibrationConfig(min_rows=50, min_positives=5)


def drawn(
    seed: int, slope: float, intercept: float, num_rows: int = 2000
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.intp]]:
    """Labels, logits and days, where P(label) = sigmoid(slope * logit + intercept)."""
    rng = np.random.default_rng(seed)
    logit = rng.normal(-1, 1.2, num_rows)
    labels = (rng.random(num_rows) < expit(slope * logit + intercept)).astype(np.float64)
    return labels, logit, rng.integers(0, 14, num_rows)


@given(st.integers(0, 10_000), st.floats(0.2, 3), st.floats(-3, 3), st.integers(60, 3000))
def test_platt_scaling_is_that_of_scikit_learn(
    seed: int, slope: float, intercept: float, num_rows: int
) -> None:
    labels, logit, days = drawn(seed, slope, intercept, num_rows)
    assume(2 < labels.sum() < len(labels) - 2)
    line = fit_platt(labels, logit, days)
    oracle = _SigmoidCalibration().fit(logit, labels)  # P = 1 / (1 + exp(a * logit + b))
    ours = expit(line.slope * logit + line.intercept)
    assert np.abs(ours - oracle.predict(logit)).max() < 2e-4  # its solver stops early, ours not


@given(st.integers(0, 10_000), st.floats(-5, 5), st.floats(1e-3, 1e4), st.floats(-1e4, 1e4))
def test_a_line_is_that_of_least_squares(
    seed: int, slope: float, scale: float, offset: float
) -> None:
    rng = np.random.default_rng(seed)
    scores = (rng.normal(0, 1, 200) * scale + offset).astype(np.float32)
    labels = slope * scores + rng.normal(0, scale, 200)
    line = fit_line(labels, scores, np.arange(200) % 7)
    oracle = LinearRegression().fit(scores.astype(np.float64)[:, None], labels)
    assert line.slope == pytest.approx(oracle.coef_[0], rel=1e-6, abs=1e-6)
    ours = line.slope * scores.astype(np.float64) + line.intercept
    assert np.allclose(ours, oracle.predict(scores.astype(np.float64)[:, None]), atol=1e-5 * scale)


def test_standard_errors_say_how_far_fits_scatter_and_heed_days() -> None:
    lines = [fit_platt(*drawn(seed, 0.8, 0.5)) for seed in range(120)]
    slopes = np.array([line.slope for line in lines])
    assert np.mean([line.slope_error for line in lines]) == pytest.approx(slopes.std(), rel=0.2)
    labels, logit, days = drawn(0, 0.8, 0.5)
    tenfold = [np.tile(values, 10) for values in (labels, logit, days)]
    # Ten copies of each row of a day tell nothing more than one.
    assert fit_platt(*tenfold).slope_error == pytest.approx(lines[0].slope_error, rel=0.02)


@pytest.mark.parametrize(
    ("labels", "scores", "is_number", "sentence"),
    [
        (np.tile([0, 1], 20), np.linspace(0.1, 0.9, 40), False, "40 labelled rows, expected at le"),
        (np.zeros(100), np.linspace(0.1, 0.9, 100), False, "0 of them with label 1; expected at"),
        (np.ones(100), np.linspace(0.1, 0.9, 100), False, "at least 5 of either label"),
        (np.tile([0, 1], 50), np.full(100, 0.3), False, "whose scores are all the same"),
        (np.full(100, 7.0), np.arange(100.0), True, "whose labels are all the same"),
        (np.repeat([1, 0], 50), np.linspace(0.1, 0.9, 100), False, "no map mends a ranking"),
        (-np.arange(100.0), np.arange(100.0), True, "Retrain instead"),
        (np.tile([0, 1], 50), np.linspace(0.1, 0.9, 100), False, "not surely above 0"),
    ],
)
def test_what_no_map_can_mend_is_refused_with_a_sentence(
    labels: Any, scores: Any, is_number: bool, sentence: str
) -> None:
    days = np.arange(len(labels)) % 14
    outcome = fit_map(labels, scores, days, WINDOW, CONFIG, is_number=is_number)
    assert outcome.fit is None
    assert sentence in str(outcome.refusal)


BETTER, UNSURE = metric(-0.02, 0.01), metric(-0.005, 0.01)
SAME = Metric(value=1e-7, low=-1e-7, high=1e-6)


def paired(**changes: Metric | None) -> PairedComparison:
    fields: dict[str, Any] = {
        "against": "champion:3",
        "auc_difference": SAME,
        "brier_difference": BETTER,
        "log_loss_difference": BETTER,
        "calibration_error_difference": BETTER,
    }
    return PairedComparison(**{**fields, **changes})


@pytest.fixture
def judged(store: ArtifactStore) -> EvaluationReport:
    return evaluation(store, trained_model(store, dataset(store, frame(300))))


def no_gain(judged: EvaluationReport, *comparisons: Comparison) -> str | None:
    return why_no_gain(judged.model_copy(update={"comparisons": comparisons}), 3)


def test_a_map_is_kept_where_every_error_is_surely_lower_and_the_ranking_the_same(
    judged: EvaluationReport,
) -> None:
    assert no_gain(judged, paired()) is None
    numbers = RegressionComparison(
        against="champion:3", r2_difference=metric(0.03), rmse_difference=BETTER
    )
    assert no_gain(judged, numbers) is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"log_loss_difference": UNSURE}, "log loss changed by -0.0050 [-0.0150, +0.0050]"),
        ({"brier_difference": UNSURE}, "Brier score changed by"),
        ({"calibration_error_difference": metric(0.1)}, "calibration error changed by +0.1"),
        ({"auc_difference": metric(0.02)}, "AUC changed by +0.02"),
        ({"auc_difference": metric(-0.02)}, "AUC changed by -0.02"),
        ({"log_loss_difference": None}, "log loss is not known"),
        ({"brier_difference": Metric(value=float("nan"), low=0, high=float("nan"))}, "Brier"),
    ],
)
def test_anything_less_is_refused_with_the_number(
    judged: EvaluationReport, changes: dict[str, Metric | None], told: str
) -> None:
    refusal = no_gain(judged, paired(**changes))
    assert told in refusal
    assert "Nothing was registered" in refusal


def test_a_judgement_beside_another_champion_shows_no_gain(judged: EvaluationReport) -> None:
    other = paired().model_copy(update={"against": "champion:4"})
    assert "another version became the champion" in str(no_gain(judged, other))
    assert "another version became the champion" in str(no_gain(judged))
