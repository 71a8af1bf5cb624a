"""One entry to the metrics of both kinds of task: rows in, quality with intervals out."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DatasetSchema, ValidatedDataset
from tasks.evaluation.bootstrap import Measured, measure, too_few
from tasks.evaluation.config import EvaluationConfig
from tasks.evaluation.regression import MeasuredNumbers, measure_numbers
from tasks.evaluation.rows import joined, read_batches, slice_columns, utc_times
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore
from tasks.stats.bootstrap import number_days

LABEL_ROWS = 65_536

AnyMeasured = Measured | MeasuredNumbers


def measure_rows(
    rows: pd.DataFrame, columns: DatasetSchema, score: str, config: EvaluationConfig
) -> AnyMeasured:
    """All metrics of one model on some labelled rows.

    Args:
        rows: label, event time, the baseline where there is one, and `score`.
        columns: names, and the kind of task.
        score: column of the model's scores.
        config: replicates, seed and bins.
    """
    labels, scores = rows[columns.label].to_numpy(), rows[score].to_numpy()
    times = utc_times(rows, columns.event_time)
    if columns.task == "classification":
        return measure(labels, scores, times, config)
    baseline = None if columns.baseline is None else rows[columns.baseline].to_numpy(np.float64)
    return measure_numbers(labels, scores, baseline, times, columns.unit, config)


def why_not_judged(
    rows: pd.DataFrame, columns: DatasetSchema, config: EvaluationConfig
) -> str | None:
    """Why labelled rows cannot be judged, in words; None where they can."""
    if rows.empty:
        return "no label is known"
    labels, times = rows[columns.label].to_numpy(), utc_times(rows, columns.event_time)
    if columns.task == "classification":
        return too_few(labels, times, config)
    days = number_days(times)[1]
    if len(rows) < config.min_slice_rows:
        return f"{len(rows):,} rows, fewer than {config.min_slice_rows:,}"
    if days < config.min_days:
        return f"{len(rows):,} rows of {days} UTC day(s), fewer than {config.min_days} days"
    if np.ptp(labels.astype(np.float64)) == 0:
        return f"{len(rows):,} rows that all have the label {labels[0]:g}"
    return None


def baseline_columns(columns: DatasetSchema) -> tuple[str, ...]:
    """The column of the baseline, if there is one."""
    return () if columns.baseline is None else (columns.baseline,)


def check_judgeable(
    rows: pd.DataFrame, columns: DatasetSchema, window: TimeWindow, config: EvaluationConfig
) -> None:
    """See that the rows of a test window can be judged.

    Raises:
        DataContractError: a label is not what the task asks for, or there are too few rows.
    """
    labels = rows[columns.label]
    nulls = int(labels.isna().sum())
    known = labels.dropna()
    is_number = columns.task == "regression"
    odd = known[~np.isfinite(known)] if is_number else known[~known.isin([0, 1])]
    if nulls or len(odd):
        raise DataContractError(
            f"test window {window}: label {columns.label!r} has {nulls:,} nulls in {len(rows):,} "
            f"rows and the other values {[float(v) for v in sorted(odd.unique())[:5]]}; expected "
            f"{'a number' if is_number else '0 or 1'} in every row. Nothing was judged"
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
