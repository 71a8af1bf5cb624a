import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.evaluation.config import EvaluationConfig
from tasks.evaluation.metrics import Measured, measure_rows, metric_of, why_not_judged
from tasks.stats.bootstrap import draw_days, number_days
from tests.support.data.builders import COLUMNS

CONFIG = EvaluationConfig(min_slice_rows=10, min_slice_positives=2)
DAY = np.timedelta64(24, "h")
START = np.datetime64("2013-09-01T00:00")


def rows_by_day(
    seed: int, num_days: int, day_noise: float, day_rows: int = 50
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, scores and times; the label of a whole day leans to one side by `day_noise`."""
    rng = np.random.default_rng(seed)
    days = np.repeat(np.arange(num_days), day_rows)
    logit = rng.normal(size=len(days)) + day_noise * rng.normal(size=num_days)[days]
    score = 1 / (1 + np.exp(-logit + day_noise * rng.normal(size=num_days)[days]))
    return rng.random(len(days)) < 1 / (1 + np.exp(-logit)), score, START + days * DAY


def frame(labels: np.ndarray, scores: np.ndarray, times: np.ndarray) -> pd.DataFrame:
    moments = pd.to_datetime(times, utc=True)
    return pd.DataFrame({COLUMNS.label: labels, "score": scores, COLUMNS.event_time: moments})


def measure(labels: np.ndarray, scores: np.ndarray, times: np.ndarray) -> Measured:
    return measure_rows(frame(labels, scores, times), COLUMNS, "score")


@given(st.integers(1, 60), st.integers(1, 30), st.integers(0, 5))
def test_every_replicate_holds_as_many_days_as_there_are(
    num_days: int, block_days: int, seed: int
) -> None:
    draws = draw_days(num_days, block_days, 100, np.random.default_rng(seed))
    assert draws.shape == (100, num_days)
    assert (draws.sum(axis=1) == num_days).all()


def test_a_replicate_is_runs_of_days_from_where_each_starts() -> None:
    (starts,) = np.random.default_rng(1).integers(12, size=(1, 4))
    runs = [(start + n) % 12 for start in starts for n in range(3)]
    (drawn,) = draw_days(12, 3, 1, np.random.default_rng(1))
    assert (drawn.dtype, drawn.tolist()) == (np.float64, [runs.count(day) for day in range(12)])


def test_intervals_are_wider_where_rows_of_a_day_resemble_each_other() -> None:
    widths = []
    for noise in (0.0, 1.5):
        labels, scores, times = rows_by_day(3, 60, noise)
        brier = measure(labels, scores, times).metric("brier")
        widths.append(brier.high - brier.low)
    assert widths[1] > 2 * widths[0]


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    large = [measure(*rows_by_day(n, 400, 0.7, day_rows=20)) for n in range(1000, 1005)]
    truth = np.mean([measured.values[0] for measured in large])
    covered = 0
    for seed in range(50):
        labels, scores, times = rows_by_day(seed, 60, 0.7, day_rows=20)
        auc = measure(labels, scores, times).metric("auc")
        covered += auc.low <= truth <= auc.high
    assert 42 <= covered <= 50


def test_the_interval_holds_its_estimate_even_where_resampling_biases_it() -> None:
    labels, scores, times = rows_by_day(5, 30, 0.0)
    perfect = measure(labels, scores, times)
    for name in ("auc", "pr_auc", "brier", "log_loss", "calibration_error", "excess_brier"):
        found = perfect.metric(name)
        assert found.low <= found.value <= found.high, name


def test_replicates_without_one_of_the_labels_are_left_out() -> None:
    found = metric_of(0.7, np.array([0.6, np.nan, 0.8]), (0.0, 1.0))
    assert found.low == pytest.approx(0.605)
    assert found.high == pytest.approx(0.795)


def test_an_interval_does_not_leave_the_range_of_its_metric() -> None:
    assert metric_of(0.99, np.array([0.9, 0.95, 1.0, 1.0, 1.0]), (0.0, 1.0)).high == 1.0


def test_a_paired_difference_is_known_better_than_either_model() -> None:
    labels, scores, times = rows_by_day(8, 40, 1.0)
    noisy = np.clip(scores + np.random.default_rng(0).normal(0, 0.1, len(scores)), 0.001, 0.999)
    one, other = (measure(labels, s, times) for s in (scores, noisy))
    difference, auc = one.minus(other, "noisy").auc_difference, one.metric("auc")
    assert difference.low > 0
    assert difference.high - difference.low < (auc.high - auc.low) / 2


def test_days_are_utc_days_that_have_rows() -> None:
    times = np.array(["2013-09-01T23:59", "2013-09-02T00:00", "2013-09-09T12:00"], "datetime64[us]")
    numbers, count = number_days(times)
    assert numbers.tolist() == [0, 1, 2]
    assert count == 3


@pytest.mark.parametrize(
    ("num_rows", "num_positives", "num_days", "reason"),
    [
        (9, 5, 9, "9 rows, fewer than 10"),
        (100, 1, 20, "1 positives in 100 rows, fewer than 2 of one label"),
        (100, 100, 20, "100 positives in 100 rows, fewer than 2 of one label"),
        (100, 50, 1, "100 rows of 1 UTC day"),
        (100, 50, 20, None),
    ],
)
def test_what_is_too_small_to_judge_is_said_with_counts(
    num_rows: int, num_positives: int, num_days: int, reason: str | None
) -> None:
    labels = np.arange(num_rows) < num_positives
    seen = why_not_judged(
        frame(labels, labels, START + (np.arange(num_rows) % num_days) * DAY), COLUMNS, CONFIG
    )
    assert (seen is None) if reason is None else (seen is not None and seen.startswith(reason))


def test_two_models_are_compared_by_every_error_on_the_same_draws() -> None:
    labels, scores, times = rows_by_day(0, 40, 0.3)
    worse = 1 / (1 + np.exp(-(0.3 * np.log(scores / (1 - scores)) + 1.5)))
    ours, theirs = (measure(labels, s, times) for s in (scores, worse))
    difference = ours.minus(theirs, "other")
    assert difference.auc_difference.value == pytest.approx(0, abs=1e-9)
    for name in ("brier", "log_loss", "calibration_error"):
        found = getattr(difference, f"{name}_difference")
        assert found.value == pytest.approx(ours.metric(name).value - theirs.metric(name).value)
        assert found.low < found.value < found.high < 0
