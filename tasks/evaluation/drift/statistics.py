"""Drift statistics of histograms: effect size with a lower bound, and PSI with its noise.

Significance alone is no use: with enough rows any difference is significant. The effect is a
distance between distributions, and its lower bound has to exceed a minimum effect. The bound
allows for the noise of the effects of all features at once, from a bootstrap of blocks of days.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tasks.evaluation.drift.histograms import MISSING_BIN, Histogram
from tasks.stats.bootstrap import Float64Array, block_length, draw_days
from tasks.stats.shift import distance, psi, shares


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


def draw_blocks(
    num_days: int, block_days: int, replicates: int, generator: np.random.Generator
) -> BlockDraws:
    """Draw days in circular blocks (Politis and Romano, 1992), as many days as there are.

    Neighbouring days resemble each other, so days drawn singly would promise more than they know.
    Blocks are shorter where fewer than `MIN_BLOCKS` would be drawn. The noise is widened by
    k / (k - 1) for k blocks, as is usual for few clusters (Cameron and Miller, 2015, section VI).
    """
    weights = draw_days(num_days, block_days, replicates, generator)
    num_blocks = num_days / block_length(num_days, block_days)
    return BlockDraws(weights, math.sqrt(num_blocks / max(num_blocks - 1, 1)))


def measure_changes(
    histograms: Sequence[Histogram],
    reference: BlockDraws,
    current: BlockDraws,
    confidence: float,
) -> list[Change]:
    """Change of each column, with lower bounds that hold for all of them together.

    By the triangle inequality an effect exceeds the true one by no more than the distance between
    the sampling errors of the two windows. The bootstrap gives that distance: the same distance of
    resampled shares minus observed shares. It is divided by its own size in each column, and the
    largest over the columns in each replicate gives one quantile for all (max-T: Westfall and
    Young, 1993; balanced as in Beran, 1988). So the bounds fail for any column in at most
    1 - `confidence` of all checks, whatever the number of columns and however they are related.
    """
    noise = np.array([_noise(h, reference, current) for h in histograms])
    size = np.sqrt(np.mean(noise**2, axis=1))
    relative = noise / np.where(size > 0, size, 1)[:, None]
    quantile = float(np.quantile(relative.max(axis=0), confidence))
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
