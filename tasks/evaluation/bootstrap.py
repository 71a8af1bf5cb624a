"""Bootstrap intervals of metrics. Whole days are drawn, in blocks: rows are not independent.

Rows of one day share what happened on it, so days are drawn and not rows (cluster bootstrap: Field
and Welsh, "Bootstrapping clustered data", 2007). Days resemble their neighbours too, so they are
drawn in runs (circular block bootstrap: Politis and Romano, 1992; Davison and Hinkley, "Bootstrap
Methods and their Application", 1997, section 8.2.3). Models are compared on the same draws, so what
they share cancels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.contracts.evaluation import Metric, MetricSet, PairedComparison
from tasks.evaluation.config import EvaluationConfig
from tasks.evaluation.metrics import METRICS, Float64Array, RankedRows

LEVELS = (0.025, 0.975)
MIN_BLOCKS = 4
RANGES = {
    "auc": (0.0, 1.0),
    "pr_auc": (0.0, 1.0),
    "brier": (0.0, 1.0),
    "log_loss": (0.0, np.inf),
    "calibration_error": (0.0, 1.0),
    "excess_brier": (-1.0, 1.0),
}


def number_days(times: NDArray[np.datetime64]) -> tuple[NDArray[np.intp], int]:
    """Number of each row's UTC day among the days that have rows, and how many days those are."""
    days, numbers = np.unique(times.astype("datetime64[D]"), return_inverse=True)
    return numbers, len(days)


def draw_days(num_days: int, config: EvaluationConfig) -> Float64Array:
    """How often each day counts in each replicate, shape (replicates, num_days).

    A replicate is as many days as there are, in blocks that start anywhere and run over the end to
    the beginning. Blocks are shorter where fewer than `MIN_BLOCKS` of them would be drawn.
    """
    length = max(1, min(config.block_days, num_days // MIN_BLOCKS))
    generator = np.random.default_rng(config.seed)
    starts = generator.integers(num_days, size=(config.replicates, math.ceil(num_days / length)))
    days = (starts[:, :, None] + np.arange(length)).reshape(config.replicates, -1)[:, :num_days]
    return np.array([np.bincount(drawn % num_days, minlength=num_days) for drawn in days], float)


def interval(value: float, replicates: Float64Array, within: tuple[float, float]) -> Metric:
    """An estimate with its 95 % bootstrap interval.

    The percentiles of the replicates, moved by the replicates' bias: a calibration error or an
    average precision is larger in a resample than in the rows it was drawn from, and plain
    percentiles can then miss the estimate itself.

    Args:
        value: the estimate.
        replicates: its bootstrap replicates; NaN (a draw without one of the labels) is left out.
        within: range of the metric, which the interval does not leave.
    """
    drawn = replicates[np.isfinite(replicates)]
    low, high = np.quantile(drawn, LEVELS) - (drawn.mean() - value)
    return Metric(value=value, low=float(max(low, within[0])), high=float(min(high, within[1])))


@dataclass(frozen=True)
class Measured:
    """All metrics of one model on some rows, and their replicates."""

    rows: RankedRows
    values: Float64Array
    replicates: Float64Array

    def metric(self, name: str) -> Metric:
        """One of `METRICS` with its interval."""
        column = METRICS.index(name)
        return interval(float(self.values[column]), self.replicates[:, column], RANGES[name])

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
            return interval(float(values[column]), replicates[:, column], (-most, most))

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
    draws = draw_days(num_days, config)
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
