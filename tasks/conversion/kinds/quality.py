"""What a conversion does to the task metric: that of the variant minus that of its source.

Intervals are those of a bootstrap: rows of one day, or neighbours, resemble each other, so whole
days or blocks are drawn, with replacement, the same ones for both models.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tasks.contracts.data import TaskKind
from tasks.contracts.evaluation import Metric
from tasks.conversion.inputs import SEED, Scores
from tasks.conversion.kinds.tabular_rows import LabelledRows
from tasks.kernel.errors import DataContractError
from tasks.stats.bootstrap import LEVELS, number_days
from tasks.stats.ranked import RankedRows

REPLICATES = 1000
Change = Callable[[Scores, Scores], Metric]
Qualities = Callable[[Scores], NDArray[np.float64]]
"""Quality of the scores of some rows: of all of them first, then of each draw."""


def paired_change(task: TaskKind, rows: LabelledRows) -> Change:
    """Change of the task's metric: AUC of a classification, R2 of a regression.

    With a single day there is nothing to draw, and the interval is the value.

    Raises:
        DataContractError: the labels do not differ.
    """
    if np.all(rows.labels == rows.labels[0]):
        raise DataContractError(
            f"the test window has the label {float(rows.labels[0]):g} in all of {len(rows.labels)} "
            "rows, so its metric is undefined; expected labels that differ. Choose a longer window"
        )
    day, num_days = number_days(rows.days)
    chances = np.full(num_days, 1 / num_days)
    draws = np.random.default_rng(SEED).multinomial(num_days, chances, size=REPLICATES)
    weights = np.vstack([np.ones(num_days), draws])
    of = _r2 if task == "regression" else _auc
    qualities = of(rows.labels, day, weights)

    def change(source: Scores, variant: Scores) -> Metric:
        changes = qualities(variant) - qualities(source)
        drawn = changes[1:][np.isfinite(changes[1:])]  # a draw whose labels do not differ has none
        low, high = np.quantile(drawn, LEVELS) if len(drawn) else (changes[0], changes[0])
        return Metric(value=float(changes[0]), low=float(low), high=float(high))

    return change


def _auc(
    labels: NDArray[np.bool_], day: NDArray[np.intp], weights: NDArray[np.float64]
) -> Qualities:
    def qualities(scores: Scores) -> NDArray[np.float64]:
        return RankedRows(labels, scores, day, num_bins=1).measure(weights)[:, 0]

    return qualities


def _r2(
    labels: NDArray[np.float64], day: NDArray[np.intp], weights: NDArray[np.float64]
) -> Qualities:
    mean = labels.mean()
    centred = labels - mean

    def summed(values: NDArray[np.float64]) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = weights @ np.bincount(day, weights=values)
        return sums

    spread = summed(centred**2) - summed(centred) ** 2 / summed(np.ones(len(labels)))

    def qualities(predictions: Scores) -> NDArray[np.float64]:
        errors = predictions.astype(np.float64) - mean - centred
        with np.errstate(invalid="ignore", divide="ignore"):
            return -summed(errors**2) / spread

    return qualities


def mean_interval(values: NDArray[np.float64], num_blocks: int) -> Metric:
    """Mean over the rows and its 95 % interval, from seeded draws of blocks of neighbours."""
    block = blocks_of(len(values), num_blocks)
    sums, counts = np.bincount(block, weights=values), np.bincount(block)
    drawn = np.random.default_rng(SEED).integers(0, len(counts), (REPLICATES, len(counts)))
    low, high = np.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), LEVELS)
    return Metric(value=float(values.mean()), low=float(low), high=float(high))


def blocks_of(rows: int, num_blocks: int) -> NDArray[np.int64]:
    """Number of the block of each row, of at most so many."""
    return np.arange(rows) * min(num_blocks, rows) // rows
