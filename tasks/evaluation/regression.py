"""Quality of predicted numbers with its intervals, and the points of their pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.contracts.evaluation import (
    CurvePoint,
    Metric,
    RegressionComparison,
    RegressionMetrics,
    ValueBand,
)
from tasks.evaluation.bootstrap import metric_of, seeded_days
from tasks.evaluation.config import EvaluationConfig
from tasks.stats.bootstrap import number_days
from tasks.stats.predicted import METRICS, Float64Array, PredictedRows

UNBOUNDED = (-np.inf, np.inf)
RANGES = {
    "r2": (-np.inf, 1.0),
    "rmse": (0.0, np.inf),
    "mae": (0.0, np.inf),
    "bias": UNBOUNDED,
    "skill": (-np.inf, 1.0),
}
BAND = (0.1, 0.9)
RESIDUAL_CLASSES = 41
RESIDUAL_REACH = 3.0
"""RMSEs to either side; what lies beyond is in the outermost classes."""


@dataclass(frozen=True)
class MeasuredNumbers:
    """All metrics of one model on some rows, and their replicates."""

    rows: PredictedRows
    values: Float64Array
    replicates: Float64Array
    unit: str

    def metric(self, name: str) -> Metric | None:
        """One of `METRICS` with its interval; None where it is not defined."""
        column = METRICS.index(name)
        value = float(self.values[column])
        if not np.isfinite(value):
            return None
        return metric_of(value, self.replicates[:, column], RANGES[name])

    def metric_set(self) -> RegressionMetrics:
        """The contract's metrics with their intervals; the labels must differ."""
        return RegressionMetrics.model_validate(
            {
                "num_rows": self.rows.num_rows,
                "unit": self.unit,
                "label_mean": float(self.rows.labels.mean()),
                "label_deviation": float(self.rows.labels.std()),
                **{name: self.metric(name) for name in METRICS},
            }
        )

    def minus(self, other: MeasuredNumbers, name: str) -> RegressionComparison:
        """This model minus another one that was measured on the same rows with the same draws."""
        values = self.values - other.values
        replicates = self.replicates - other.replicates

        def difference(metric: str) -> Metric:
            column = METRICS.index(metric)
            return metric_of(float(values[column]), replicates[:, column], UNBOUNDED)

        return RegressionComparison(
            against=name, r2_difference=difference("r2"), rmse_difference=difference("rmse")
        )


def measure_numbers(
    labels: NDArray[Any],
    predictions: NDArray[Any],
    baseline: NDArray[Any] | None,
    times: NDArray[np.datetime64],
    unit: str,
    config: EvaluationConfig,
) -> MeasuredNumbers:
    """All metrics of some rows with their replicates; equal rows give equal draws.

    Args:
        labels: numbers that differ, shape (rows,).
        predictions: shape (rows,).
        baseline: shape (rows,), NaN where it is not known; None for none.
        times: event times in UTC, shape (rows,), of at least two days.
        unit: of the labels.
        config: replicates, seed and blocks.
    """
    days, num_days = number_days(times)
    rows = PredictedRows(labels, predictions, baseline, days)
    return MeasuredNumbers(rows, rows.estimate(), rows.measure(seeded_days(num_days, config)), unit)


def error_ratio(
    model: MeasuredNumbers, plain: Sequence[MeasuredNumbers], tolerance: float
) -> Metric:
    """RMSE of a model over that of the plain prediction that errs least, with its interval.

    Args:
        model: of some rows.
        plain: at least one prediction of the same rows, with the same draws.
        tolerance: RMSE above 0, in the label's unit, that every plain prediction counts as having
            at least: next to a perfect one any model would look bad, however small its error.
    """
    column = METRICS.index("rmse")
    value, *others = (m.values[column] for m in (model, *plain))
    replicates, *other_replicates = (m.replicates[:, column] for m in (model, *plain))
    least = np.minimum.reduce(other_replicates)
    return metric_of(
        float(value / max(min(others), tolerance)),
        replicates / np.maximum(least, tolerance),
        RANGES["rmse"],
    )


def observed_by_prediction(rows: PredictedRows, num_bins: int) -> tuple[ValueBand, ...]:
    """Labels in bins of equally many rows by prediction, lowest first."""
    predictions = rows.labels + rows.errors
    order = np.argsort(predictions, kind="stable")
    bands = []
    for part in np.array_split(order, min(num_bins, len(order))):
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
