"""Metrics of all kinds of task with their intervals: rows in, quality out.

Intervals are those of a bootstrap of days. Models that are measured on the same rows share their
draws, so that in a difference the common noise cancels.

The points of the curves that a report draws of a model's quality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DatasetSchema, ValidatedDataset
from tasks.contracts.evaluation import (
    Comparison,
    CurvePoint,
    Metric,
    MetricSet,
    PairedComparison,
    Quality,
    RegressionComparison,
    RegressionMetrics,
    ScoredWindow,
    ValueBand,
)
from tasks.evaluation.config import EvaluationConfig
from tasks.evaluation.scoring import SCORE, joined, read_batches, slice_columns, utc_times
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore
from tasks.stats.bootstrap import draw_days, interval, number_days
from tasks.stats.predicted import PredictedRows
from tasks.stats.ranked import Float64Array, RankedClasses, RankedRows

REPLICATES = 500
BLOCK_DAYS = 7  # a week: days resemble each other for about as long
CALIBRATION_BINS = 20
LABEL_ROWS = 65_536
AGAINST = "present champion"
UNBOUNDED = (-np.inf, np.inf)
COMPARED_RANKED = ("auc", "brier", "log_loss", "calibration_error")
COMPARED_NUMBERS = ("r2", "rmse")
RANGES = {
    **dict.fromkeys(("auc", "pr_auc", "calibration_error"), (0.0, 1.0)),
    "brier": (0.0, 2.0),  # a sum, of several classes
    **dict.fromkeys(("log_loss", "rmse", "mae"), (0.0, np.inf)),
    **dict.fromkeys(("r2", "skill"), (-np.inf, 1.0)),
    "excess_brier": (-2.0, 2.0),
    "bias": UNBOUNDED,
}
Rows = RankedRows | RankedClasses | PredictedRows


def seeded_days(num_days: int) -> Float64Array:
    """Draws of the days that are the same for the same number of days."""
    return draw_days(num_days, BLOCK_DAYS, REPLICATES, np.random.default_rng(0))


def metric_of(value: float, replicates: Float64Array, within: tuple[float, float]) -> Metric:
    """An estimate with its 95 % bootstrap interval."""
    low, high = interval(value, replicates, within)
    return Metric(value=value, low=low, high=high)


@dataclass(frozen=True)
class Measured:
    """All metrics of one model on some rows, and their replicates.

    Args:
        rows: of a classification ranked by score, of a regression predicted numbers.
        values: each of `rows.metrics` on all rows, shape (metrics,).
        replicates: the same in each draw of the days, shape (draws, metrics).
        unit: of the labels of a regression.
        by_class: name of each of several classes to the same of that class against the rest.
    """

    rows: Rows
    values: Float64Array
    replicates: Float64Array
    unit: str = ""
    by_class: dict[str, Measured] = field(default_factory=dict)

    @property
    def is_number(self) -> bool:
        """Whether the labels are those of a regression."""
        return isinstance(self.rows, PredictedRows)

    def metric(self, name: str) -> Metric | None:
        """One of `rows.metrics` with its interval; None where it is not defined."""
        column = self.rows.metrics.index(name)
        value = float(self.values[column])
        if not np.isfinite(value):
            return None
        return metric_of(value, self.replicates[:, column], RANGES[name])

    def metric_set(self, *, each: bool = False) -> Quality:
        """The contract's metrics with their intervals; the labels must differ.

        Args:
            each: of several classes, those of each against the rest too.
        """
        labels = self.rows.labels
        found: dict[str, object] = {name: self.metric(name) for name in self.rows.metrics}
        if not isinstance(self.rows, PredictedRows):
            del found["excess_brier"]
            if each:
                found["by_class"] = {name: of.metric_set() for name, of in self.by_class.items()}
            facts = {"num_rows": len(labels), "base_rate": self.rows.base_rate}
            return MetricSet.model_validate({**facts, **found})
        spread = {"label_mean": float(labels.mean()), "label_deviation": float(labels.std())}
        return RegressionMetrics.model_validate(
            {"num_rows": len(labels), "unit": self.unit, **spread, **found}
        )

    def minus(self, other: Measured, name: str) -> Comparison:
        """This model minus another one, `name`, that was measured on the same rows and draws."""
        is_ranked = not self.is_number
        kind = PairedComparison if is_ranked else RegressionComparison
        found: dict[str, object] = {"against": name}
        for metric in COMPARED_RANKED if is_ranked else COMPARED_NUMBERS:
            column, most = self.rows.metrics.index(metric), RANGES[metric][1]
            value = float(self.values[column] - other.values[column])
            replicates = self.replicates[:, column] - other.replicates[:, column]
            within = (-most, most) if is_ranked else UNBOUNDED
            found[f"{metric}_difference"] = metric_of(value, replicates, within)
        return kind.model_validate(found)


def measure_rows(rows: pd.DataFrame, columns: DatasetSchema, score: str) -> Measured:
    """All metrics of one model on some labelled rows; equal rows give equal draws.

    Args:
        rows: labels that differ, event times of at least two days, the baseline where there is one,
            and `score`.
        columns: names, and the kind of task.
        score: column of the model's scores.
    """
    ready, num_days = _by_day(rows, columns, score)
    draws = seeded_days(num_days)
    if not isinstance(ready, RankedClasses):
        return Measured(ready, ready.estimate(), ready.measure(draws), columns.unit)
    of = {
        name: Measured(each, each.estimate(), each.measure(draws))
        for name, each in zip(columns.classes, ready.classes, strict=True)
    }
    replicates = ready.together(np.stack([m.replicates for m in of.values()]), draws)
    return Measured(ready, ready.estimate(), replicates, by_class=of)


def primary_metric(
    rows: pd.DataFrame, columns: DatasetSchema, score: str, *, replicates: bool = True
) -> tuple[float, Float64Array]:
    """What models are compared by, alone and so cheaply: the AUC, or R2 of a regression.

    Args:
        rows: as `measure_rows` takes them; equal rows give equal draws.
        columns: names, and the kind of task.
        score: column of the model's scores.
        replicates: draw days too.

    Returns:
        The estimate, NaN where it is not defined, and its replicates, shape (draws,).
    """
    ready, num_days = _by_day(rows, columns.model_copy(update={"baseline": None}), score)
    once = np.ones((1, num_days))
    draws = np.concatenate([once, seeded_days(num_days)]) if replicates else once
    found = ready.measure(draws)[:, 0] if isinstance(ready, PredictedRows) else ready.auc(draws)
    return float(found[0]), found[1:]


def _by_day(rows: pd.DataFrame, columns: DatasetSchema, score: str) -> tuple[Rows, int]:
    """Labelled rows that are ready to be weighted by day, and how many days they have."""
    labels, scores = rows[columns.label].to_numpy(), rows[[*columns.score_columns(score)]]
    days, num_days = number_days(utc_times(rows, columns.event_time))
    if columns.task == "multi-class":
        return RankedClasses(labels, scores.to_numpy(), days, CALIBRATION_BINS), num_days
    of_row = scores[score].to_numpy()
    if columns.task == "classification":
        return RankedRows(labels, of_row, days, CALIBRATION_BINS), num_days
    baseline = None if columns.baseline is None else rows[columns.baseline].to_numpy(np.float64)
    return PredictedRows(labels, of_row, baseline, days), num_days


def error_ratio(model: Measured, plain: Sequence[Measured], tolerance: float) -> Metric:
    """RMSE of a model over that of the plain prediction that errs least, with its interval.

    Args:
        model: of some rows, of a regression.
        plain: at least one prediction of the same rows, with the same draws.
        tolerance: RMSE above 0, in the label's unit, that every plain prediction counts as having
            at least: next to a perfect one any model would look bad, however small its error.
    """
    column = model.rows.metrics.index("rmse")
    value, *others = (m.values[column] for m in (model, *plain))
    replicates, *other_replicates = (m.replicates[:, column] for m in (model, *plain))
    least = np.maximum(np.minimum.reduce(other_replicates), tolerance)
    ratio = float(value / max(min(others), tolerance))
    return metric_of(ratio, replicates / least, RANGES["rmse"])


def why_not_judged(
    rows: pd.DataFrame, columns: DatasetSchema, config: EvaluationConfig
) -> str | None:
    """Why labelled rows cannot be judged, in words; None where they can."""
    if rows.empty:
        return "no label is known"
    labels, num_rows = rows[columns.label].to_numpy(np.float64), len(rows)
    if num_rows < config.min_slice_rows:
        return f"{num_rows:,} rows, fewer than {config.min_slice_rows:,}"
    least = config.min_slice_positives
    if columns.task == "classification":
        positives = int(np.count_nonzero(labels))
        if min(positives, num_rows - positives) < least:
            return (
                f"{positives:,} positives in {num_rows:,} rows, fewer than {least:,} of one label"
            )
    if columns.task == "multi-class":
        if other := int(num_rows - np.isin(labels, range(columns.num_labels)).sum()):
            return f"{other:,} of {num_rows:,} labels are no number of a class"
        counts = np.bincount(labels.astype(np.intp), minlength=columns.num_labels)
        if counts.min() < least:
            rarest = columns.classes[int(counts.argmin())]
            return f"{counts.min():,} of {num_rows:,} rows are {rarest!r}, fewer than {least:,}"
    days = number_days(utc_times(rows, columns.event_time))[1]
    if days < config.min_days:
        return f"{num_rows:,} rows of {days} UTC day(s), fewer than {config.min_days} days"
    if np.ptp(labels) == 0:
        return f"{num_rows:,} rows that all have the label {labels[0]:g}"
    return None


def baseline_columns(columns: DatasetSchema) -> tuple[str, ...]:
    """The column of the baseline, if there is one."""
    return () if columns.baseline is None else (columns.baseline,)


def judged_columns(columns: DatasetSchema) -> tuple[str, ...]:
    """What is read of a row, beside its score, to judge the score."""
    return (columns.row_id, columns.event_time, columns.label, *baseline_columns(columns))


def check_judgeable(
    rows: pd.DataFrame, columns: DatasetSchema, window: TimeWindow, config: EvaluationConfig
) -> None:
    """See that the rows of a test window can be judged.

    Raises:
        DataContractError: a label is not what the task asks for, or there are too few rows.
    """
    known = rows[columns.label].dropna()
    nulls, is_number = len(rows) - len(known), columns.task == "regression"
    wanted = range(columns.num_labels)
    odd = known[~np.isfinite(known)] if is_number else known[~known.isin(wanted)]
    if nulls or len(odd):
        raise DataContractError(
            f"test window {window}: label {columns.label!r} has {nulls:,} nulls in {len(rows):,} "
            f"rows and the other values {[float(v) for v in sorted(odd.unique())[:5]]}; expected "
            f"{'a number' if is_number else f'0 to {wanted[-1]}'} in every row. Nothing was judged"
        )
    reason = why_not_judged(rows, columns, config)
    if reason is not None:
        raise DataContractError(
            f"test window {window} is too small to judge: {reason}. Nothing was judged; choose a "
            "longer test window, or lower the limits in the evaluation's configuration"
        )


def check_test_window(
    dataset: ValidatedDataset, window: TimeWindow, config: EvaluationConfig, store: ArtifactStore
) -> None:
    """See before training that the test window will be judged, from its labels and times alone.

    Raises:
        DataContractError: it holds no row, or cannot be judged.
        ConfigurationError: a slice names no column.
        ArtifactError: the snapshot is absent or damaged.
    """
    columns = dataset.snapshot.columns
    slice_columns(columns, config)
    wanted = (columns.label, columns.event_time)
    rows = joined(read_batches(dataset, window, wanted, store, LABEL_ROWS), dataset, window)
    check_judgeable(rows, columns, window, config)


def compare_scored(
    previous: ScoredWindow, current: ScoredWindow, columns: DatasetSchema, store: ArtifactStore
) -> Comparison | None:
    """Previous minus current champion on the labelled rows, both on the same bootstrap draws.

    Args:
        previous: scores of the one.
        current: scores of the other, of the same rows.
        columns: of the snapshot that both scored.
        store: holds the scores.

    Returns:
        The differences; None where labels are too few to judge.

    Raises:
        DataContractError: they are not of the same rows.
        ArtifactError: scores are absent or damaged.
    """
    if (previous.snapshot_sha256, previous.window) != (current.snapshot_sha256, current.window):
        raise DataContractError(
            f"one model scored {previous.window} of snapshot {previous.snapshot_sha256[:12]}, the "
            f"other {current.window} of {current.snapshot_sha256[:12]}; score the same rows first"
        )
    if previous.metrics is None or current.metrics is None:
        return None
    one, other = (pq.read_table(store.path(s.scores)).to_pandas() for s in (previous, current))
    if not np.array_equal(one[columns.row_id].to_numpy(), other[columns.row_id].to_numpy()):
        raise DataContractError(
            f"two models scored {current.window}, and the ids of their rows differ; remove the "
            "stored scores and score the window again"
        )
    known = other[columns.label].notna()
    plain = columns.model_copy(update={"baseline": None})  # it is no part of what is compared
    return measure_rows(one[known], plain, SCORE).minus(
        measure_rows(other[known], plain, SCORE), AGAINST
    )


MAX_POINTS = 200  # more than a picture has pixels for
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
        low, high = np.quantile(labels, (0.1, 0.9))
        x, mean = float(predictions[part].mean()), float(labels.mean())
        bands.append(ValueBand(x=x, low=low, mean=mean, high=high, num_rows=len(part)))
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
