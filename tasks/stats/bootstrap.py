"""Bootstrap of whole days, drawn in blocks: rows are not independent.

Rows of one day share what happened on it, so days are drawn and not rows (cluster bootstrap: Field
and Welsh, "Bootstrapping clustered data", 2007). Days resemble their neighbours too, so they are
drawn in runs (circular block bootstrap: Politis and Romano, 1992; Davison and Hinkley, "Bootstrap
Methods and their Application", 1997, section 8.2.3).
"""

import math

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]

LEVELS = (0.025, 0.975)
MIN_BLOCKS = 4


def number_days(times: NDArray[np.datetime64]) -> tuple[NDArray[np.intp], int]:
    """Number of each row's UTC day among the days that have rows, and how many days those are."""
    days, numbers = np.unique(times.astype("datetime64[D]"), return_inverse=True)
    return numbers, len(days)


def block_length(num_days: int, block_days: int) -> int:
    """Days of a block: shorter where fewer than `MIN_BLOCKS` of them would be drawn."""
    return max(1, min(block_days, num_days // MIN_BLOCKS))


def draw_days(
    num_days: int, block_days: int, replicates: int, generator: np.random.Generator
) -> Float64Array:
    """How often each day counts in each replicate, shape (replicates, num_days).

    A replicate is as many days as there are, in blocks that start anywhere and run over the end to
    the beginning.
    """
    length = block_length(num_days, block_days)
    starts = generator.integers(num_days, size=(replicates, math.ceil(num_days / length)))
    days = (starts[:, :, None] + np.arange(length)).reshape(replicates, -1)[:, :num_days]
    return np.array([np.bincount(drawn % num_days, minlength=num_days) for drawn in days], float)


def interval(
    value: float, replicates: Float64Array, within: tuple[float, float]
) -> tuple[float, float]:
    """95 % bootstrap interval of an estimate.

    The percentiles of the replicates, moved by the replicates' bias: a calibration error or an
    average precision is larger in a resample than in the rows it was drawn from, and plain
    percentiles can then miss the estimate itself.

    Args:
        value: the estimate.
        replicates: its bootstrap replicates; NaN (a draw without one of the labels) is left out.
        within: range of the metric, which the interval does not leave.
    """
    drawn = replicates[np.isfinite(replicates)]
    low, high = np.quantile(drawn, LEVELS) - (drawn.mean() - value)
    return float(max(low, within[0])), float(min(high, within[1]))
