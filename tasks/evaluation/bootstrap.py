"""Bootstrap intervals of metrics. Models share their draws, so common noise cancels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.contracts.evaluation import Metric, MetricSet, PairedComparison
from tasks.evaluation.config import EvaluationConfig
from tasks.stats.bootstrap import draw_days, interval, number_days
from tasks.stats.ranked import METRICS, Float64Array, RankedRows

RANGES = {
    "auc": (0.0, 1.0),
    "pr_auc": (0.0, 1.0),
    "brier": (0.0, 1.0),
    "log_loss": (0.0, np.inf),
    "calibration_error": (0.0, 1.0),
    "excess_brier": (-1.0, 1.0),
}


def seeded_days(num_days: int, config: EvaluationConfig) -> Float64Array:
    """Draws of the days that are the same for the same number of days and configuration."""
    generator = np.random.default_rng(config.seed)
    return draw_days(num_days, config.block_days, config.replicates, generator)


def metric_of(value: float, replicates: Float64Array, within: tuple[float, float]) -> Metric:
    """An estimate with its 95 % bootstrap interval."""
    low, high = interval(value, replicates, within)
    return Metric(value=value, low=low, high=high)


@dataclass(frozen=True)
class Measured:
    """All metrics of one model on some rows, and their replicates."""

    rows: RankedRows
    values: Float64Array
    replicates: Float64Array

    def metric(self, name: str) -> Metric:
        """One of `METRICS` with its interval."""
        column = METRICS.index(name)
        return metric_of(float(self.values[column]), self.replicates[:, column], RANGES[name])

    def metric_set(self) -> MetricSet:
        """The contract's metrics with their intervals."""
        return MetricSet(
            num_rows=self.rows.num_rows,
            base_rate=float(self.rows.labels.mean()),
            auc=self.metric("auc"),
            pr_auc=self.metric("pr_auc"),
            brier=self.metric("brier"),
            log_loss=self.metric("log_loss"),
            calibration_error=self.metric("calibration_error"),
        )

    def minus(self, other: Measured, name: str) -> PairedComparison:
        """This model minus another one that was measured on the same rows with the same draws."""
        values = self.values - other.values
        replicates = self.replicates - other.replicates

        def difference(metric: str) -> Metric:
            column, most = METRICS.index(metric), RANGES[metric][1]
            return metric_of(float(values[column]), replicates[:, column], (-most, most))

        return PairedComparison(
            against=name,
            auc_difference=difference("auc"),
            brier_difference=difference("brier"),
            log_loss_difference=difference("log_loss"),
            calibration_error_difference=difference("calibration_error"),
        )


def measure(
    labels: NDArray[Any],
    scores: NDArray[np.floating[Any]],
    times: NDArray[np.datetime64],
    config: EvaluationConfig,
) -> Measured:
    """All metrics of some rows with their replicates; equal rows give equal draws.

    Args:
        labels: 0 or 1, both present, shape (rows,).
        scores: probabilities, shape (rows,).
        times: event times in UTC, shape (rows,), of at least two days.
        config: replicates, seed and bins.
    """
    days, num_days = number_days(times)
    rows = RankedRows(labels, scores, days, config.calibration_bins)
    draws = seeded_days(num_days, config)
    return Measured(rows, rows.estimate(), rows.measure(draws))


def too_few(
    labels: NDArray[Any], times: NDArray[np.datetime64], config: EvaluationConfig
) -> str | None:
    """Why rows cannot be judged, in words; None where they can."""
    rows, positives = len(labels), int(np.count_nonzero(labels))
    days = number_days(times)[1]
    if rows < config.min_slice_rows:
        return f"{rows:,} rows, fewer than {config.min_slice_rows:,}"
    if min(positives, rows - positives) < config.min_slice_positives:
        return (
            f"{positives:,} positives in {rows:,} rows, fewer than {config.min_slice_positives:,} "
            "of one label"
        )
    if days < config.min_days:
        return f"{rows:,} rows of {days} UTC day(s), fewer than {config.min_days} days"
    return None
