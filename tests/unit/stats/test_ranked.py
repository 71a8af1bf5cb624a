import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import entropy, ks_2samp
from sklearn.metrics import (
    average_precision_score,
    brier_score_loss,
    log_loss,
    roc_auc_score,
    roc_curve,
)

from tasks.stats import ranked
from tasks.stats.ranked import METRICS, RankedRows
from tasks.stats.shift import PSI_PRIOR, distance, psi, shares

WeightedRows = tuple[NDArray[np.int8], NDArray[np.float64], NDArray[np.intp], NDArray[np.float64]]


@st.composite
def weighted_rows(draw: st.DrawFn) -> WeightedRows:
    """Labels, scores with ties, days, and a weight for each day that leaves both labels."""
    num_rows = draw(st.integers(4, 60))
    labels = np.array(draw(st.lists(st.integers(0, 1), min_size=num_rows, max_size=num_rows)))
    levels = st.integers(1, 99).map(lambda n: n / 100)
    scores = np.array(draw(st.lists(levels, min_size=num_rows, max_size=num_rows)))
    days = np.arange(num_rows, dtype=np.intp) // 2 % 5
    weights = np.array(draw(st.lists(st.integers(0, 3), min_size=5, max_size=5)), dtype=float)
    labels[:2], weights[0] = (0, 1), max(weights[0], 1)
    return labels.astype(np.int8), scores, days, weights[: days.max() + 1]


@given(weighted_rows())
def test_weighted_metrics_equal_those_of_scikit_learn(case: WeightedRows) -> None:
    labels, scores, days, weights = case
    rows = RankedRows(labels, scores, days, num_bins=4)
    seen = dict(zip(METRICS, rows.measure(weights[None])[0], strict=True))
    each = weights[days]
    assert seen["auc"] == pytest.approx(roc_auc_score(labels, scores, sample_weight=each))
    assert seen["pr_auc"] == pytest.approx(
        average_precision_score(labels, scores, sample_weight=each)
    )
    assert seen["brier"] == pytest.approx(brier_score_loss(labels, scores, sample_weight=each))
    assert seen["log_loss"] == pytest.approx(
        log_loss(labels, scores, sample_weight=each, labels=[0, 1])
    )
    promised = np.average(scores * (1 - scores), weights=each)
    assert seen["excess_brier"] == pytest.approx(seen["brier"] - promised)


@given(weighted_rows())
def test_a_weight_counts_like_that_many_copies(case: WeightedRows) -> None:
    labels, scores, days, weights = case
    copies = np.repeat(np.arange(len(labels)), weights[days].astype(int))
    weighted = RankedRows(labels, scores, days, num_bins=1).measure(weights[None])[0]
    _, renumbered = np.unique(days[copies], return_inverse=True)
    copied = RankedRows(labels[copies], scores[copies], renumbered, num_bins=1).estimate()
    assert weighted == pytest.approx(copied)


def test_blocks_of_steps_give_what_one_block_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    scores = rng.random(500).round(2)
    labels, days = rng.random(500) < scores, rng.integers(0, 9, 500)
    rows, weights = RankedRows(labels, scores, days, 10), rng.integers(0, 4, (7, 9)).astype(float)
    whole = rows.measure(weights)
    monkeypatch.setattr(ranked, "BLOCK_STEPS", 3)
    assert rows.measure(weights) == pytest.approx(whole)


def test_the_calibration_error_is_the_mean_gap_between_score_and_rate_over_equal_bins() -> None:
    scores = np.array([0.9, 0.9, 0.8, 0.8, 0.2, 0.2, 0.1, 0.1])
    labels = np.array([1, 1, 1, 0, 1, 0, 0, 0])
    rows = RankedRows(labels, scores, np.zeros(8, dtype=np.intp), num_bins=2)
    error = rows.estimate()[METRICS.index("calibration_error")]
    assert error == pytest.approx((abs(0.75 - 0.85) + abs(0.25 - 0.15)) / 2)


def test_equal_scores_share_a_calibration_bin() -> None:
    scores = np.full(10, 0.3)
    labels = np.array([1, 1, 1, 0, 0, 0, 0, 0, 0, 0])
    rows = RankedRows(labels, scores, np.zeros(10, dtype=np.intp), num_bins=5)
    assert rows.estimate()[METRICS.index("calibration_error")] == pytest.approx(0.0)


def test_true_probabilities_have_no_excess_brier_score_and_boasts_have_one() -> None:
    rng = np.random.default_rng(1)
    truth = rng.beta(2, 5, 200_000)
    labels, days = rng.random(200_000) < truth, np.zeros(200_000, dtype=np.intp)
    boast = truth**2 / (truth**2 + (1 - truth) ** 2)
    honest, boasting = (
        RankedRows(labels, scores, days, 10).estimate()[METRICS.index("excess_brier")]
        for scores in (truth, boast)
    )
    assert abs(honest) < 0.002
    assert boasting > 0.02


def test_one_label_has_no_area() -> None:
    rows = RankedRows(np.ones(5), np.linspace(0.1, 0.9, 5), np.arange(5), 2)
    auc, pr_auc, brier, *_ = rows.estimate()
    assert np.isnan(auc)
    assert pr_auc == pytest.approx(1.0)
    assert np.isfinite(brier)


def test_certain_scores_have_a_finite_log_loss() -> None:
    rows = RankedRows(np.array([0, 1]), np.array([1.0, 0.0]), np.array([0, 1]), 2)
    assert rows.estimate()[METRICS.index("log_loss")] == pytest.approx(-np.log(1e-7))


def test_the_curve_passes_through_every_threshold() -> None:
    rng = np.random.default_rng(2)
    scores, labels = rng.random(300).round(1), rng.random(300) < 0.3
    true, false = RankedRows(labels, scores, np.zeros(300, dtype=np.intp), 5).curve()
    x, y, _ = roc_curve(labels, scores, drop_intermediate=False)
    assert false / false[-1] == pytest.approx(x)
    assert true / true[-1] == pytest.approx(y)


@given(
    st.lists(st.integers(0, 1000), min_size=2, max_size=8),
    st.lists(st.integers(0, 1000), min_size=8, max_size=8),
)
def test_psi_is_the_sum_of_both_relative_entropies(left: list[int], right: list[int]) -> None:
    p, q = np.array(left, float), np.array(right[: len(left)], float)
    assert psi(p, q) == pytest.approx(psi(q, p))
    assert psi(p, q) >= 0
    assert psi(p, p) == 0
    both = [(counts + PSI_PRIOR) for counts in (p, q)]
    assert psi(p, q) == pytest.approx(entropy(*both) + entropy(*both[::-1]), abs=1e-12)


@pytest.mark.filterwarnings("ignore:ks_2samp:RuntimeWarning")  # of the p-value
@given(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9), min_size=1))
def test_the_distance_of_numbers_is_that_of_kolmogorov_and_smirnov(
    left: list[int], right: list[int]
) -> None:
    p, q = (shares(np.bincount(values, minlength=10).astype(float)) for values in (left, right))
    assert distance(p - q, ordered=True) == pytest.approx(ks_2samp(left, right).statistic)
