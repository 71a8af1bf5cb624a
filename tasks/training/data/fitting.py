"""Fitting the preprocessing on all ranks' training rows, and checks made by all together."""

from __future__ import annotations

from collections import Counter
from typing import cast

import numpy as np

from tasks.contracts import TimeWindow
from tasks.errors import DataContractError
from tasks.training.data.preprocess import Preprocessing, fit_preprocessing
from tasks.training.data.shards import ShardRows, sample_rows
from tasks.training.run_directory import TrainingJob
from tasks.training.strategies.horovod_exchange import HorovodExchange

# Rows over all shards from which the quantiles of numbers are taken.
MAX_SAMPLE_ROWS = 100_000


def fit_on_all_ranks(job: TrainingJob, rows: ShardRows, exchange: HorovodExchange) -> Preprocessing:
    """Fit vocabularies on all training rows and bins on a seeded sample of them. Collective.

    Every rank brings counts and a sample of its own shards and fits on what all brought, so that
    all get the same result, whatever their number.

    Raises:
        DataContractError: two categories of one column share a code.
    """
    columns, config = job.columns, job.config
    positions = sample_rows(rows, -(-MAX_SAMPLE_ROWS // config.num_shards), config.seed)
    all_counts = cast(list[dict[str, dict[str, int]]], exchange.gather_values(rows.category_counts))
    merged: dict[str, Counter[str]] = {name: Counter() for name in columns.categorical}
    for counts in all_counts:
        for name, of_rank in counts.items():
            merged[name].update(of_rank)
    return fit_preprocessing(
        columns,
        merged,
        exchange.gather_rows(rows.numeric[positions]),
        _has_missing(rows, exchange),
        min_category_rows=config.min_category_rows,
        num_bins=config.num_bins,
    )


def _has_missing(rows: ShardRows, exchange: HorovodExchange) -> list[bool]:
    """Per numeric column: some, but not all, training rows of all ranks lack a value."""
    missing = np.isnan(rows.numeric).sum(axis=0, dtype=np.float64)
    total = exchange.sum(np.append(missing, float(rows.num_rows)))
    return [bool(0 < lacking < total[-1]) for lacking in total[:-1]]


def check_shards(rows: ShardRows, window: TimeWindow, num_shards: int) -> None:
    """Refuse training rows that leave one of this rank's shards empty.

    Raises:
        DataContractError: a shard has no rows.
    """
    empty = [shard for shard, size in rows.sizes.items() if size == 0]
    if empty:
        raise DataContractError(
            f"shard(s) {', '.join(map(str, empty))} of {num_shards} have no training rows: the "
            f"snapshot holds {rows.num_rows} of this rank's rows in {window}. Widen the training "
            "window or lower num_shards"
        )


def check_labels(name: str, rows: ShardRows, window: TimeWindow, exchange: HorovodExchange) -> int:
    """Rows of a window over all ranks; refuse a window without both labels. Collective.

    Raises:
        DataContractError: there are no rows, or all have the same label.
    """
    counts = exchange.sum(np.array([rows.num_rows, rows.labels.sum()], dtype=np.float64))
    num_rows, num_positive = int(counts[0]), int(counts[1])
    if num_positive in (0, num_rows):
        raise DataContractError(
            f"the {name} window {window} has {num_rows} rows, {num_positive} of them with label 1; "
            "expected rows of both labels. Widen the window or build the snapshot again"
        )
    return num_rows
