"""Quality by the values of a column, where there are enough rows to speak of it."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from tasks.contracts.data import DatasetSchema
from tasks.contracts.evaluation import SliceMetrics
from tasks.evaluation.config import MONTH, EvaluationConfig
from tasks.evaluation.metrics import error_ratio, measure_rows, why_not_judged
from tasks.evaluation.scoring import BASELINE_MODEL_SCORE, SCORE

MISSING = "(missing)"
SLICE_TOLERANCE = 0.1
"""RMSE on a slice of a regression that does no harm, in standard deviations of the label."""
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
    tolerance = SLICE_TOLERANCE * float(rows[columns.label].std(ddof=0))
    for name in config.slices:
        small = []
        for value, part in _parts(rows, columns, name):
            reason = why_not_judged(part, columns, config)
            if reason is not None:
                small.append((f"{name}={value}: {reason}", len(part)))
                continue
            measured, ratio = measure_rows(part, columns, SCORE), None
            if columns.task == "regression":
                plain = [measure_rows(p, columns, PLAIN) for p in _plain(part, columns)]
                ratio = error_ratio(measured, plain, tolerance)
            judged.append(
                SliceMetrics(
                    column=name, value=value, metrics=measured.metric_set(), error_ratio=ratio
                )
            )
        skipped += _listed(name, small)
    return tuple(judged), tuple(skipped)


def _plain(part: pd.DataFrame, columns: DatasetSchema) -> Iterator[pd.DataFrame]:
    """The rows with each plain prediction; where the baseline is unknown, the baseline model's."""
    yield part.assign(**{PLAIN: part[BASELINE_MODEL_SCORE]})
    if columns.baseline is not None:
        yield part.assign(**{PLAIN: part[columns.baseline].fillna(part[BASELINE_MODEL_SCORE])})


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
