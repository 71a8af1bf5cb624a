import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from tasks.evaluation.config import EvaluationConfig
from tasks.evaluation.judge import judge_slices
from tasks.evaluation.metrics import MAX_POINTS, calibration_curve, roc_curve
from tasks.stats.ranked import METRICS, RankedRows
from tests.support.data import builders
from tests.support.data.builders import COLUMNS

CONFIG = EvaluationConfig(slices=("carrier", "month"), min_slice_rows=100, min_slice_positives=20)


def scored(num_rows: int = 3000) -> pd.DataFrame:
    rows = builders.frame(num_rows)
    rng = np.random.default_rng(0)
    return rows.assign(score=np.clip(rows["late_rate_24h"] + rng.normal(0, 0.05, num_rows), 0, 1))


def test_each_slice_is_judged_on_its_own_rows() -> None:
    rows = scored()
    slices, skipped = judge_slices(rows, COLUMNS, CONFIG)
    assert skipped == ()
    assert sum(s.metrics.num_rows for s in slices if s.column == "carrier") == len(rows)
    for part in (s for s in slices if s.column == "carrier"):
        own = rows[rows["carrier"] == part.value]
        assert part.metrics.auc.value == pytest.approx(roc_auc_score(own["is_late"], own["score"]))


def test_slices_too_small_or_of_one_label_or_of_one_day_are_skipped_with_counts() -> None:
    rows = scored()
    rows["carrier"] = "AA"
    rows.loc[:50, "carrier"] = "small"
    rows.loc[100:400, ["carrier", "is_late"]] = ["never", 0]
    rows.loc[500:700, "carrier"] = "one day"
    rows.loc[500:700, "event_timestamp"] = rows["event_timestamp"].iloc[0]
    slices, skipped = judge_slices(
        rows, COLUMNS, CONFIG.model_copy(update={"slices": ("carrier",)})
    )
    assert [s.value for s in slices] == ["AA"]
    assert set(skipped) == {
        "carrier=small: 51 rows, fewer than 100",
        "carrier=never: 0 positives in 301 rows, fewer than 20 of one label",
        "carrier=one day: 201 rows of 1 UTC day(s), fewer than 7 days",
    }


def ranked(seed: int = 0) -> RankedRows:
    rng = np.random.default_rng(seed)
    scores = rng.beta(2, 5, 5000)
    return RankedRows(rng.random(5000) < scores, scores, np.zeros(5000, dtype=np.intp), 10)


def test_the_roc_curve_runs_from_corner_to_corner_and_holds_its_area() -> None:
    rows = ranked()
    points = roc_curve(rows)
    assert len(points) <= MAX_POINTS
    assert (points[0].x, points[0].y, points[-1].x, points[-1].y) == (0, 0, 1, 1)
    area = np.trapezoid([p.y for p in points], [p.x for p in points])
    assert area == pytest.approx(roc_auc_score(rows.labels, rows.scores), abs=2e-3)


def test_the_calibration_error_can_be_read_off_the_calibration_curve() -> None:
    rows = ranked(seed=3)
    points = calibration_curve(rows)
    assert len(points) == 10
    assert [p.x for p in points] == sorted(p.x for p in points)
    assert sum(p.weight for p in points) == len(rows.labels)
    error = sum(p.weight * abs(p.x - p.y) for p in points) / len(rows.labels)
    assert error == pytest.approx(rows.estimate()[METRICS.index("calibration_error")])
