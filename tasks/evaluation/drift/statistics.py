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
from numpy.typing import NDArray

from tasks.evaluation.drift.histograms import MISSING_BIN, Histogram
from tasks.evaluation.drift.window import Float64Array

MIN_BLOCKS = 4
PSI_PRIOR = 0.5  # rows added to every bin, so that an empty bin has a logarithm


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
    length = max(1, min(block_days, num_days // MIN_BLOCKS))
    starts = generator.integers(num_days, size=(replicates, math.ceil(num_days / length)))
    days = (starts[:, :, None] + np.arange(length)).reshape(replicates, -1)[:, :num_days]
    weights = np.array([np.bincount(row % num_days, minlength=num_days) for row in days], float)
    num_blocks = num_days / length
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


def psi(reference: Float64Array, current: Float64Array) -> NDArray[np.float64]:
    """Population stability index between counts over the last axis, half a row added to each bin.

    Sum of (q - p) ln(q / p) over the bins with reference shares p and current shares q.
    """
    p, q = (
        (counts + PSI_PRIOR) / (counts + PSI_PRIOR).sum(axis=-1, keepdims=True)
        for counts in (reference, current)
    )
    index: NDArray[np.float64] = ((q - p) * np.log(q / p)).sum(axis=-1)
    return index


def distance(difference: Float64Array, *, ordered: bool) -> NDArray[np.float64]:
    """KS or total variation distance from a difference of shares over the last axis."""
    if ordered:
        ks: NDArray[np.float64] = np.abs(np.cumsum(difference, axis=-1)).max(axis=-1)
        return ks
    variation: NDArray[np.float64] = np.abs(difference).sum(axis=-1) / 2
    return variation


def _shares(counts: Float64Array) -> Float64Array:
    shares: Float64Array = counts / counts.sum(axis=-1, keepdims=True)
    return shares


def _noise(histogram: Histogram, reference: BlockDraws, current: BlockDraws) -> Float64Array:
    """Distance between the sampling errors of both windows in each replicate."""
    errors = [
        draws.widening * (_shares(draws.weights @ counts) - _shares(counts.sum(axis=0)))
        for draws, counts in ((reference, histogram.reference), (current, histogram.current))
    ]
    return distance(errors[1] - errors[0], ordered=histogram.ordered)


def _change(
    histogram: Histogram, allowance: float, reference: BlockDraws, current: BlockDraws
) -> Change:
    p, q = (_shares(c.sum(axis=0)) for c in (histogram.reference, histogram.current))
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
