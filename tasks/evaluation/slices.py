"""Quality by the values of a column, where there are enough rows to speak of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tasks.contracts.data import DatasetSchema
from tasks.contracts.evaluation import CurvePoint, Metric, SliceMetrics
from tasks.evaluation.config import MONTH, EvaluationConfig
from tasks.evaluation.measuring import measure_rows, why_not_judged
from tasks.evaluation.regression import MeasuredNumbers, error_ratio
from tasks.evaluation.rows import SCORE, YARDSTICK_SCORE
from tasks.stats.ranked import Float64Array, RankedRows

MISSING = "(missing)"
MAX_LISTED = 20
PLAIN = "plain_score"


def judge_slices(
    rows: pd.DataFrame, columns: DatasetSchema, config: EvaluationConfig
) -> tuple[tuple[SliceMetrics, ...], tuple[str, ...]]:
    """Metrics of each slice, largest first within a column, and the slices too small to judge.

    Args:
        rows: label, event time, `score`, `yardstick_score` of a regression, the baseline if any,
            and the slice columns.
        columns: names of the label and event time.
        config: slices and limits.
    """
    judged: list[SliceMetrics] = []
    skipped: list[str] = []
    tolerance = config.slice_tolerance * float(rows[columns.label].std(ddof=0))
    for name in config.slices:
        small = []
        for value, part in _parts(rows, columns, name):
            reason = why_not_judged(part, columns, config)
            if reason is not None:
                small.append((f"{name}={value}: {reason}", len(part)))
                continue
            judged.append(_judged(part, columns, config, tolerance, name, value))
        skipped += _listed(name, small)
    return tuple(judged), tuple(skipped)


def _judged(
    part: pd.DataFrame,
    columns: DatasetSchema,
    config: EvaluationConfig,
    tolerance: float,
    column: str,
    value: str,
) -> SliceMetrics:
    measured = measure_rows(part, columns, SCORE, config)
    ratio: Metric | None = None
    if isinstance(measured, MeasuredNumbers):
        plain = [measure_rows(p, columns, PLAIN, config) for p in _plain(part, columns)]
        ratio = error_ratio(
            measured, [m for m in plain if isinstance(m, MeasuredNumbers)], tolerance
        )
    return SliceMetrics(
        column=column, value=value, metrics=measured.metric_set(), error_ratio=ratio
    )


def _plain(part: pd.DataFrame, columns: DatasetSchema) -> Iterator[pd.DataFrame]:
    """The rows with each plain prediction; where the baseline is unknown, the yardstick's."""
    yield part.assign(**{PLAIN: part[YARDSTICK_SCORE]})
    if columns.baseline is not None:
        yield part.assign(**{PLAIN: part[columns.baseline].fillna(part[YARDSTICK_SCORE])})


def _parts(
    rows: pd.DataFrame, columns: DatasetSchema, name: str
) -> Iterator[tuple[str, pd.DataFrame]]:
    if name == MONTH:
        values = rows[columns.event_time].dt.tz_convert("UTC").dt.strftime("%Y-%m")
        sizes = values.value_counts().sort_index()
    else:
        values = rows[name].astype(object).where(rows[name].notna(), MISSING).astype(str)
        sizes = values.value_counts()
        sizes = sizes[sorted(sizes.index, key=lambda value: (-sizes[value], value))]
    groups = rows.groupby(values.to_numpy(), sort=False)
    for value in sizes.index:
        yield str(value), groups.get_group(value)


def _listed(name: str, small: list[tuple[str, int]]) -> list[str]:
    texts = [text for text, _ in small[:MAX_LISTED]]
    rest = small[MAX_LISTED:]
    if rest:
        texts.append(f"{name}: {len(rest):,} more values, {sum(n for _, n in rest):,} rows")
    return texts


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
