"""A column as counts by day and bin; all drift statistics are weighted sums of these.

Bin 0 is missing. Bins are fixed by the reference, so both windows are counted alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.evaluation.drift.window import Categories, Float64Array, Numbers, WindowColumns

MISSING_BIN = 0


@dataclass(frozen=True)
class Histogram:
    """Rows of one column by day and bin in both windows.

    Args:
        reference: shape (reference days, bins).
        current: shape (current days, bins).
        ordered: bins after the first are in the order of a number.
        group_starts: first bin of each group of neighbouring bins that the PSI takes as one.
        unseen: share of the current rows whose category the reference does not have.
    """

    reference: Float64Array
    current: Float64Array
    ordered: bool
    group_starts: NDArray[np.intp]
    unseen: float = 0.0


def quantile_cuts(ranked: Float64Array, num_bins: int) -> Float64Array:
    """Left edges of the quantile bins of sorted values, all but the first, which is open.

    A value that fills a bin or more, such as the zero of rain, gets a bin to itself: otherwise its
    edges collapse and rows that leave it are not seen. Values must not be NaN.
    """
    if not len(ranked):
        return np.empty(0)
    quantiles = ranked[np.arange(1, num_bins) * len(ranked) // num_bins]
    spikes = quantiles[1:][np.diff(quantiles) == 0]
    return np.unique(np.concatenate([quantiles, np.nextafter(spikes, np.inf)]))


def count_numbers(reference: Numbers, current: Numbers, num_bins: int, psi_bins: int) -> Histogram:
    """Count a numeric column of both windows in quantile bins of the reference.

    Args:
        reference: the column's values there.
        current: the same.
        num_bins: fine bins, a multiple of `psi_bins`.
        psi_bins: bins of the PSI.
    """
    cuts, coarse = (quantile_cuts(reference.ranked, number) for number in (num_bins, psi_bins))
    starts = np.concatenate([[MISSING_BIN, 1], 2 + np.searchsorted(cuts, coarse)])
    before, now = (_count_ranked(numbers, cuts) for numbers in (reference, current))
    return Histogram(before, now, True, starts.astype(np.intp))


def _count_ranked(numbers: Numbers, cuts: Float64Array) -> Float64Array:
    """Rows by day and bin: a bin is a stretch of the sorted values."""
    window, num_bins = numbers.window, len(cuts) + 2
    edges = np.searchsorted(numbers.ranked, cuts, side="left")
    sizes = np.diff(edges, prepend=0, append=len(numbers.ranked))
    bins = np.repeat(np.arange(1, num_bins), sizes)
    cells = numbers.ranked_days * num_bins + bins
    counts = np.bincount(cells, minlength=window.num_days * num_bins).astype(np.float64)
    by_day = counts.reshape(window.num_days, num_bins)
    rows = np.bincount(window.days, minlength=window.num_days)
    by_day[:, MISSING_BIN] = rows - by_day.sum(axis=1)
    return by_day


def count_categories(
    reference: tuple[WindowColumns, Categories],
    current: tuple[WindowColumns, Categories],
    max_categories: int,
) -> Histogram:
    """Count a category column of both windows.

    The most frequent categories of the reference have a bin each; after them comes one bin of its
    other categories and one of those it does not have.
    """
    sizes = reference[1].sizes
    ranked = sorted(sizes, key=lambda name: (-sizes[name], name))
    other = min(len(ranked), max_categories) + 1
    bins = {name: min(rank, other) for rank, name in enumerate(ranked, start=1)}

    def count(window: WindowColumns, column: Categories) -> Float64Array:
        numbers = column.numbered(bins, default=other + 1)
        return _count_by_day(window, np.nan_to_num(numbers, nan=MISSING_BIN), other + 2)

    counts = count(*current)
    unseen = float(counts[:, other + 1].sum() / counts.sum())
    return Histogram(count(*reference), counts, False, np.arange(other + 2), unseen)


def _count_by_day(window: WindowColumns, bins: NDArray[Any], num_bins: int) -> Float64Array:
    cells = window.days * num_bins + bins.astype(np.intp)
    counts = np.bincount(cells, minlength=window.num_days * num_bins)
    return counts.astype(np.float64).reshape(window.num_days, num_bins)
