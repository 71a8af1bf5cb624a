"""A slice's error beside what plain predictions have there: what the gate on slices judges."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import root_mean_squared_error

from tasks.contracts.evaluation import SliceMetrics
from tasks.evaluation.config import EvaluationConfig
from tasks.evaluation.judge import judge_slices
from tasks.evaluation.metrics import error_ratio, measure_rows
from tests.support.data import builders
from tests.support.evaluation.programs import NUMBERS

CONFIG = EvaluationConfig(slices=("carrier",), min_slice_rows=100)
ERRORS = {"score": 3.0, "yardstick_score": 3.0, "temp": 6.0}
"""Standard deviation of the errors of each prediction; labels have about 20."""


def rows_with(**errors: float) -> pd.DataFrame:
    """Rows of some carriers, each prediction as wrong as told."""
    rows = builders.frame(4000)
    rng = np.random.default_rng(3)
    label = rng.normal(40, 20, len(rows))
    rows[NUMBERS.label] = label
    for name, deviation in {**ERRORS, **errors}.items():
        rows[name] = label + rng.normal(0, deviation, len(rows))
    return rows


def judged(rows: pd.DataFrame) -> dict[str, SliceMetrics]:
    slices, _ = judge_slices(rows, NUMBERS, CONFIG)
    return {part.value: part for part in slices}


def ratio(part: SliceMetrics) -> float:
    return part.error_ratio.value


@pytest.mark.parametrize("better", ["yardstick_score", "temp"])
def test_a_slice_is_compared_with_the_plain_prediction_that_errs_least_there(better: str) -> None:
    rows = rows_with(**{better: 2.5})
    for value, part in judged(rows).items():
        own = rows[rows["carrier"] == value]
        label = own[NUMBERS.label]
        plain = min(root_mean_squared_error(label, own[n]) for n in ("yardstick_score", "temp"))
        assert ratio(part) == pytest.approx(root_mean_squared_error(label, own["score"]) / plain)


def test_a_model_that_is_bad_on_one_slice_alone_stands_out_there() -> None:
    rows = rows_with()
    before = judged(rows)
    worst = max(before, key=lambda value: before[value].metrics.num_rows)
    spoilt = rows["carrier"] == worst
    rows.loc[spoilt, "score"] += 12
    after = judged(rows)
    assert after[worst].error_ratio.low > 3
    assert max([ratio(part) for value, part in after.items() if value != worst]) < 1.2


def test_a_classification_has_no_ratio_and_needs_no_baseline_model() -> None:
    rows = builders.frame(3000)
    rows["score"] = rows["late_rate_24h"].clip(0, 1)
    slices, _ = judge_slices(rows, builders.COLUMNS, CONFIG)
    assert slices
    assert all(part.error_ratio is None for part in slices)


@given(
    st.floats(0.01, 50), st.floats(0.0, 50), st.floats(0.0, 50), st.floats(1e-3, 50), st.integers()
)
def test_a_ratio_is_finite_positive_and_inside_its_interval(
    own: float, first: float, second: float, tolerance: float, seed: int
) -> None:
    rng = np.random.default_rng(abs(seed))
    labels = rng.normal(0, 10, 200)
    times = pd.date_range("2013-09-01", periods=200, freq="3h", tz="UTC")
    plain_columns = NUMBERS.model_copy(update={"baseline": None})
    model, *plain = (
        measure_rows(
            pd.DataFrame(
                {
                    NUMBERS.label: labels,
                    NUMBERS.event_time: times,
                    "score": labels + rng.normal(0, 1, 200) * size,
                }
            ),
            plain_columns,
            "score",
        )
        for size in (own, first, second)
    )
    found = error_ratio(model, plain, tolerance)
    assert 0 < found.low <= found.value <= found.high < np.inf
    assert found.value <= model.values[1] / tolerance
