"""One entry to the metrics of both kinds of task: rows in, quality with intervals out."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DatasetSchema, ValidatedDataset
from tasks.contracts.evaluation import Comparison, ScoredWindow
from tasks.evaluation.bootstrap import Measured, measure, too_few
from tasks.evaluation.config import EvaluationConfig
from tasks.evaluation.regression import MeasuredNumbers, measure_numbers
from tasks.evaluation.rows import SCORE, joined, read_batches, slice_columns, utc_times
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


def difference(one: AnyMeasured, other: AnyMeasured, name: str) -> Comparison:
    """One model minus another of the same rows and draws, which is called `name`."""
    if isinstance(one, Measured):
        assert isinstance(other, Measured)
        return one.minus(other, name)
    assert isinstance(other, MeasuredNumbers)
    return one.minus(other, name)


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


AGAINST = "present champion"


def compare_scored(
    former: ScoredWindow,
    present: ScoredWindow,
    columns: DatasetSchema,
    config: EvaluationConfig,
    store: ArtifactStore,
) -> Comparison | None:
    """Former minus present model on the labelled rows, both on the same bootstrap draws.

    Args:
        former: scores of the one.
        present: scores of the other, of the same rows.
        columns: of the snapshot that both scored.
        config: bootstrap.
        store: holds the scores.

    Returns:
        The differences; None where labels are too few to judge.

    Raises:
        DataContractError: they are not of the same rows.
        ArtifactError: scores are absent or damaged.
    """
    if (former.snapshot_sha256, former.window) != (present.snapshot_sha256, present.window):
        raise DataContractError(
            f"one model scored {former.window} of snapshot {former.snapshot_sha256[:12]}, the other"
            f" {present.window} of {present.snapshot_sha256[:12]}; score the same rows first"
        )
    if former.metrics is None or present.metrics is None:
        return None
    one, other = (_rows(scored, store) for scored in (former, present))
    if not np.array_equal(one[columns.row_id].to_numpy(), other[columns.row_id].to_numpy()):
        raise DataContractError(
            f"two models scored {present.window}, and the ids of their rows differ; remove the "
            "stored scores and score the window again"
        )
    known = other[columns.label].notna()
    plain = columns.model_copy(update={"baseline": None})  # it is no part of what is compared
    ours, theirs = (measure_rows(rows[known], plain, SCORE, config) for rows in (one, other))
    return difference(ours, theirs, AGAINST)


def _rows(scored: ScoredWindow, store: ArtifactStore) -> pd.DataFrame:
    rows: pd.DataFrame = pq.read_table(store.path(scored.scores)).to_pandas()
    return rows
