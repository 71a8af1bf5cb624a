from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from tasks.evaluation.metrics import (
    MAX_POINTS,
    calibration_curve,
    roc_curve,
)
from tasks.stats.ranked import METRICS, RankedRows


def ranked(num_rows: int = 5000, seed: int = 0, num_bins: int = 10) -> RankedRows:
    rng = np.random.default_rng(seed)
    scores = rng.beta(2, 5, num_rows)
    return RankedRows(
        rng.random(num_rows) < scores, scores, np.zeros(num_rows, dtype=np.intp), num_bins
    )


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
