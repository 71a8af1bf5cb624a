"""ROC, precision-recall and calibration curves, thinned to what a picture can show."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tasks.contracts.evaluation import CurvePoint
from tasks.stats.ranked import Float64Array, RankedRows


def roc_curve(rows: RankedRows, max_points: int) -> tuple[CurvePoint, ...]:
    """False positive rate (x) against true positive rate (y), from (0, 0) to (1, 1)."""
    true, false = rows.curve()
    x, y = false / false[-1], true / true[-1]
    return _points(x, y, _spread_out(x + y, max_points))


def precision_recall_curve(rows: RankedRows, max_points: int) -> tuple[CurvePoint, ...]:
    """Recall (x) against precision (y), from the highest score down."""
    true, false = (counts[1:] for counts in rows.curve())  # no precision before the first score
    recall = true / true[-1]
    return _points(recall, true / (true + false), _spread_out(recall, max_points))


def calibration_curve(rows: RankedRows) -> tuple[CurvePoint, ...]:
    """Mean score (x) against share of positives (y) of each bin, lowest first; weight is its rows.

    The same bins as those of the calibration error, so the error can be read off the curve.
    """
    counts = np.bincount(rows.bins)
    scores = np.bincount(rows.bins, weights=rows.scores)
    labels = np.bincount(rows.bins, weights=rows.labels)
    filled = np.flatnonzero(counts)[::-1]  # ranks fall, scores shall rise
    return tuple(
        CurvePoint(x=scores[b] / counts[b], y=labels[b] / counts[b], weight=float(counts[b]))
        for b in filled
    )


def _spread_out(position: Float64Array, max_points: int) -> NDArray[np.intp]:
    """Indices of points at about equal steps of a rising position, first and last included."""
    steps = np.linspace(position[0], position[-1], max_points - 1)
    chosen: NDArray[np.intp] = np.append(np.searchsorted(position, steps), len(position) - 1)
    return np.unique(chosen)


def _points(x: Float64Array, y: Float64Array, chosen: NDArray[np.intp]) -> tuple[CurvePoint, ...]:
    return tuple(CurvePoint(x=float(x[i]), y=float(y[i])) for i in chosen)
