"""Drift statistics of histograms: effect size with a lower bound, and PSI with its noise.

Significance alone is no use: with enough rows any difference is significant. The effect is a
distance between distributions, and its lower bound has to exceed a minimum effect. The bound
allows for the noise of the effects of all features at once, from a bootstrap of blocks of days.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.evaluation.drift.window import Categories, Float64Array, Numbers, WindowColumns
from tasks.stats.bootstrap import block_length, draw_days
from tasks.stats.shift import distance, psi, shares

CONFIDENCE = 0.95
"""Of the lower bounds of all columns together: more features give no more alarms."""
REPLICATES = 500
BLOCK_DAYS = 7  # a week: days resemble each other for about as long
NUM_BINS, PSI_BINS = 100, 10
"""Quantile bins of the reference: fine ones for effects, groups of ten of them for the PSI."""
MAX_CATEGORIES = 200
MISSING_BIN = 0


@dataclass(frozen=True)
class Change:
    """Change of one column between two windows.

    Args:
        effect: KS distance of a number, missing taken as a value below all others, or total
            variation distance of a category; 0 to 1.
        effect_low: lower bound of the effect, simultaneous over all columns.
        psi: population stability index, missing as a bin.
        psi_noise: PSI to expect where nothing but sampling changed.
        missing_reference: share of rows.
        missing_current: share of rows.
    """

    effect: float
    effect_low: float
    psi: float
    psi_noise: float
    missing_reference: float
    missing_current: float


@dataclass(frozen=True)
class BlockDraws:
    """Bootstrap draws of the days of one window.

    Args:
        weights: how often each day counts in each replicate, shape (replicates, days).
        widening: factor on the noise of the replicates, above 1: few blocks understate it.
    """

    weights: Float64Array
    widening: float


def draw_blocks(num_days: int, generator: np.random.Generator) -> BlockDraws:
    """Draw days in circular blocks (Politis and Romano, 1992), as many days as there are.

    Neighbouring days resemble each other, so days drawn singly would promise more than they know.
    Blocks are shorter where fewer than `MIN_BLOCKS` would be drawn. The noise is widened by
    k / (k - 1) for k blocks, as is usual for few clusters (Cameron and Miller, 2015, section VI).
    """
    weights = draw_days(num_days, BLOCK_DAYS, REPLICATES, generator)
    num_blocks = num_days / block_length(num_days, BLOCK_DAYS)
    return BlockDraws(weights, math.sqrt(num_blocks / max(num_blocks - 1, 1)))


def measure_changes(
    histograms: Sequence[Histogram], reference: BlockDraws, current: BlockDraws
) -> list[Change]:
    """Change of each column, with lower bounds that hold for all of them together.

    By the triangle inequality an effect exceeds the true one by no more than the distance between
    the sampling errors of the two windows. The bootstrap gives that distance: the same distance of
    resampled shares minus observed shares. It is divided by its own size in each column, and the
    largest over the columns in each replicate gives one quantile for all (max-T: Westfall and
    Young, 1993; balanced as in Beran, 1988). So the bounds fail for any column in at most
    1 - `CONFIDENCE` of all checks, whatever the number of columns and however they are related.
    """
    noise = np.array([_noise(h, reference, current) for h in histograms])
    size = np.sqrt(np.mean(noise**2, axis=1))
    relative = noise / np.where(size > 0, size, 1)[:, None]
    quantile = float(np.quantile(relative.max(axis=0), CONFIDENCE))
    return [
        _change(histogram, quantile * s, reference, current)
        for histogram, s in zip(histograms, size, strict=True)
    ]


def _noise(histogram: Histogram, reference: BlockDraws, current: BlockDraws) -> Float64Array:
    """Distance between the sampling errors of both windows in each replicate."""
    errors = [
        draws.widening * (shares(draws.weights @ counts) - shares(counts.sum(axis=0)))
        for draws, counts in ((reference, histogram.reference), (current, histogram.current))
    ]
    return distance(errors[1] - errors[0], ordered=histogram.ordered)


def _change(
    histogram: Histogram, allowance: float, reference: BlockDraws, current: BlockDraws
) -> Change:
    p, q = (shares(c.sum(axis=0)) for c in (histogram.reference, histogram.current))
    effect = float(distance(q - p, ordered=histogram.ordered))
    before, after = (
        np.add.reduceat(counts, histogram.group_starts, axis=1)
        for counts in (histogram.reference, histogram.current)
    )
    # For small changes the PSI is quadratic, so the noise of the two windows adds up.
    noise = sum(
        float(psi(counts.sum(axis=0), draws.weights @ counts).mean())
        for draws, counts in ((reference, before), (current, after))
    )
    return Change(
        effect=effect,
        effect_low=max(0.0, effect - allowance),
        psi=float(psi(before.sum(axis=0), after.sum(axis=0))),
        psi_noise=noise,
        missing_reference=float(p[MISSING_BIN]),
        missing_current=float(q[MISSING_BIN]),
    )


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


def count_numbers(reference: Numbers, current: Numbers) -> Histogram:
    """Count a numeric column of both windows in quantile bins of the reference."""
    cuts, coarse = (quantile_cuts(reference.ranked, number) for number in (NUM_BINS, PSI_BINS))
    starts = np.concatenate([[MISSING_BIN, 1], 2 + np.searchsorted(cuts, coarse)])
    before, now = (_count_ranked(numbers, cuts) for numbers in (reference, current))
    return Histogram(before, now, True, starts.astype(np.intp))


def _count_ranked(numbers: Numbers, cuts: Float64Array) -> Float64Array:
    """Rows by day and bin: a bin is a stretch of the sorted values."""
    window, num_bins = numbers.window, len(cuts) + 2
    edges = np.searchsorted(numbers.ranked, cuts, side="left")
    sizes = np.diff(edges, prepend=0, append=len(numbers.ranked))
    bins = np.repeat(np.arange(1, num_bins), sizes)
    by_day = _count_by_day(window.num_days, numbers.ranked_days, bins, num_bins)
    rows = np.bincount(window.days, minlength=window.num_days)
    by_day[:, MISSING_BIN] = rows - by_day.sum(axis=1)
    return by_day


def count_categories(
    reference: tuple[WindowColumns, Categories], current: tuple[WindowColumns, Categories]
) -> Histogram:
    """Count a category column of both windows.

    The most frequent categories of the reference have a bin each; after them comes one bin of its
    other categories and one of those it does not have.
    """
    sizes = reference[1].sizes
    ranked = sorted(sizes, key=lambda name: (-sizes[name], name))
    other = min(len(ranked), MAX_CATEGORIES) + 1
    bins = {name: min(rank, other) for rank, name in enumerate(ranked, start=1)}

    def count(window: WindowColumns, column: Categories) -> Float64Array:
        bins_of_rows = np.nan_to_num(column.numbered(bins, default=other + 1), nan=MISSING_BIN)
        return _count_by_day(window.num_days, window.days, bins_of_rows, other + 2)

    counts = count(*current)
    unseen = float(counts[:, other + 1].sum() / counts.sum())
    return Histogram(count(*reference), counts, False, np.arange(other + 2), unseen)


def _count_by_day(
    num_days: int, days: NDArray[Any], bins: NDArray[Any], num_bins: int
) -> Float64Array:
    cells = days * np.intp(num_bins) + bins.astype(np.intp)
    counts = np.bincount(cells, minlength=num_days * num_bins)
    return counts.astype(np.float64).reshape(num_days, num_bins)
