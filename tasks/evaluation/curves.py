"""The points of the curves that a report draws of a model's quality."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tasks.contracts.evaluation import CurvePoint, ValueBand
from tasks.evaluation.metrics import CALIBRATION_BINS
from tasks.stats.predicted import PredictedRows
from tasks.stats.ranked import Float64Array, RankedRows

MAX_POINTS = 200  # more than a picture has pixels for
BAND = (0.1, 0.9)
RESIDUAL_CLASSES = 41
RESIDUAL_REACH = 3.0
"""RMSEs to either side; what lies beyond is in the outermost classes."""


def roc_curve(rows: RankedRows) -> tuple[CurvePoint, ...]:
    """False positive rate (x) against true positive rate (y), from (0, 0) to (1, 1)."""
    true, false = rows.curve()
    x, y = false / false[-1], true / true[-1]
    return _points(x, y, _spread_out(x + y))


def precision_recall_curve(rows: RankedRows) -> tuple[CurvePoint, ...]:
    """Recall (x) against precision (y), from the highest score down."""
    true, false = (counts[1:] for counts in rows.curve())  # no precision before the first score
    recall = true / true[-1]
    return _points(recall, true / (true + false), _spread_out(recall))


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


def _spread_out(position: Float64Array) -> NDArray[np.intp]:
    """Indices of points at about equal steps of a rising position, first and last included."""
    steps = np.linspace(position[0], position[-1], MAX_POINTS - 1)
    chosen: NDArray[np.intp] = np.append(np.searchsorted(position, steps), len(position) - 1)
    return np.unique(chosen)


def _points(x: Float64Array, y: Float64Array, chosen: NDArray[np.intp]) -> tuple[CurvePoint, ...]:
    return tuple(CurvePoint(x=float(x[i]), y=float(y[i])) for i in chosen)


def observed_by_prediction(rows: PredictedRows) -> tuple[ValueBand, ...]:
    """Labels in bins of equally many rows by prediction, lowest first."""
    predictions = rows.labels + rows.errors
    order = np.argsort(predictions, kind="stable")
    bands = []
    for part in np.array_split(order, min(CALIBRATION_BINS, len(order))):
        labels = rows.labels[part]
        low, high = np.quantile(labels, BAND)
        bands.append(
            ValueBand(
                x=float(predictions[part].mean()),
                low=float(low),
                mean=float(labels.mean()),
                high=float(high),
                num_rows=len(part),
            )
        )
    return tuple(bands)


def residual_classes(rows: PredictedRows) -> tuple[CurvePoint, ...]:
    """Rows by error (prediction minus label), in classes of equal width around 0."""
    reach = RESIDUAL_REACH * max(float(np.sqrt((rows.errors**2).mean())), np.finfo(float).tiny)
    width = 2 * reach / RESIDUAL_CLASSES
    edges = np.linspace(-reach, reach, RESIDUAL_CLASSES + 1)
    counts, _ = np.histogram(np.clip(rows.errors, -reach, reach), edges)
    middles = (edges[:-1] + edges[1:]) / 2
    return tuple(
        CurvePoint(x=float(x), y=width, weight=float(n))
        for x, n in zip(middles, counts, strict=True)
    )
