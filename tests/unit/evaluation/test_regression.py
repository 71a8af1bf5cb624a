import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score
from torch import Tensor

from tasks.evaluation.judge import score_window
from tasks.evaluation.metrics import measure_rows, observed_by_prediction, residual_classes
from tasks.kernel.errors import DataContractError
from tasks.stats.predicted import PredictedRows
from tests.support.data import builders
from tests.support.evaluation.programs import NUMBERS, QUICK, Case, LateRate, stored_program


class Linear(LateRate):
    """What decides the label of `numbers`, but for the noise."""

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        known = torch.nan_to_num(numeric) + categorical.float().sum(1, keepdim=True) * 0
        return self.slope * known[:, 2] + known[:, 1] / 40


class NotFinite(Linear):
    """Overflows where a number is missing."""

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        return super().forward(categorical, numeric) + torch.isnan(numeric[:, 4]) / 0.0


def numbers(num_rows: int = 4000) -> pd.DataFrame:
    """The builders' rows with a label in minutes, and a baseline that is often missing."""
    rows = builders.frame(num_rows)
    rng = np.random.default_rng(5)
    label = 60 * rows["late_rate_24h"] + rows["minute_of_day"] / 40 + rng.normal(0, 4, num_rows)
    rows[NUMBERS.label] = label.astype(np.float64)
    rough = label + rng.normal(0, 9, num_rows)
    rows["temp"] = np.where(rng.random(num_rows) < 0.1, np.nan, rough).astype(np.float32)
    return rows


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("regression")
    return Case.of(folder, numbers(), NUMBERS, Linear(60.0), Linear(20.0))


@pytest.mark.slow
def test_a_stranger_recomputes_the_report_from_the_predictions(case: Case) -> None:
    report = case.judged()
    rows = pd.read_parquet(case.store.path(report.predictions))
    label, score = rows[NUMBERS.label], rows["score"].astype(float)
    overall = report.overall
    assert overall.num_rows == len(rows)
    assert overall.unit == "minutes"
    assert overall.r2.value == pytest.approx(r2_score(label, score))
    assert overall.rmse.value == pytest.approx(mean_squared_error(label, score) ** 0.5)
    assert overall.mae.value == pytest.approx(mean_absolute_error(label, score))
    assert overall.bias.value == pytest.approx((score - label).mean())
    known = rows["temp"].notna()
    errors = [((one - label)[known] ** 2).mean() for one in (score, rows["temp"].astype(float))]
    assert overall.skill.value == pytest.approx(1 - errors[0] / errors[1])
    assert report.baseline.num_rows == known.sum()
    assert report.baseline.rmse.value == pytest.approx(errors[1] ** 0.5)


def test_predictions_that_are_not_finite_are_refused(case: Case) -> None:
    program = stored_program(case.store, NotFinite()).model_copy(update={"columns": NUMBERS})
    with pytest.raises(DataContractError, match=r"are no numbers .* expected finite values"):
        score_window(program, case.dataset, builders.month(9), QUICK, case.store)


@given(st.integers(2, 300), st.integers(1, 9), st.integers(0, 20))
def test_metrics_are_those_of_scikit_learn_for_any_weights(
    num_rows: int, num_days: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    labels, errors = rng.normal(1e5, 50, num_rows), rng.normal(2, 20, num_rows)
    baseline = np.where(rng.random(num_rows) < 0.3, np.nan, labels + rng.normal(0, 30, num_rows))
    days = rng.integers(num_days, size=num_rows)
    rows = PredictedRows(labels, labels + errors, baseline, days)
    weights = rng.integers(0, 3, (1, int(days.max()) + 1)).astype(float)
    of_rows = weights[0][days]
    if of_rows.sum() == 0 or np.unique(labels[of_rows > 0]).size < 2:
        return
    r2, rmse, mae, bias, skill = rows.measure(weights)[0]
    predicted = labels + errors
    squared = mean_squared_error(labels, predicted, sample_weight=of_rows)
    assert r2 == pytest.approx(r2_score(labels, predicted, sample_weight=of_rows), rel=1e-6)
    assert rmse == pytest.approx(squared**0.5)
    assert mae == pytest.approx(mean_absolute_error(labels, predicted, sample_weight=of_rows))
    assert bias == pytest.approx(np.average(errors, weights=of_rows), abs=1e-6)
    known = np.isfinite(baseline) & (of_rows > 0)
    if known.any():
        own, other = (
            np.average(e[known] ** 2, weights=of_rows[known]) for e in (errors, baseline - labels)
        )
        assert skill == pytest.approx(1 - own / other)
    else:
        assert np.isnan(skill)


def test_without_a_baseline_there_is_no_skill() -> None:
    plain = NUMBERS.model_copy(update={"baseline": None})
    metrics = measure_rows(numbers(400).assign(score=1.0), plain, "score").metric_set()
    assert metrics.skill is None
    assert metrics.r2.low <= metrics.r2.value <= metrics.r2.high <= 1


@given(st.integers(1, 500))
def test_bands_and_classes_hold_every_row_once(num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    labels = rng.normal(size=num_rows)
    predictions = labels + rng.standard_t(2, num_rows)
    rows = PredictedRows(labels, predictions, None, np.zeros(num_rows, dtype=np.intp))
    bands, classes = observed_by_prediction(rows), residual_classes(rows)
    assert sum(band.num_rows for band in bands) == num_rows
    assert sum(part.weight for part in classes) == num_rows
    assert all(band.low <= band.high for band in bands)
    assert [band.x for band in bands] == sorted(band.x for band in bands)
