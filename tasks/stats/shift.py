"""How far two distributions over the same bins are apart."""

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]

PSI_PRIOR = 0.5  # rows added to every bin, so that an empty bin has a logarithm


def psi(reference: Float64Array, current: Float64Array) -> Float64Array:
    """Population stability index between counts over the last axis, half a row added to each bin.

    Sum of (q - p) ln(q / p) over the bins with reference shares p and current shares q.
    """
    p, q = (shares(counts + PSI_PRIOR) for counts in (reference, current))
    index: Float64Array = ((q - p) * np.log(q / p)).sum(axis=-1)
    return index


def distance(difference: Float64Array, *, ordered: bool) -> Float64Array:
    """KS or total variation distance from a difference of shares over the last axis."""
    if ordered:
        ks: Float64Array = np.abs(np.cumsum(difference, axis=-1)).max(axis=-1)
        return ks
    variation: Float64Array = np.abs(difference).sum(axis=-1) / 2
    return variation


def shares(counts: Float64Array) -> Float64Array:
    """Counts over the last axis as shares of their sum."""
    found: Float64Array = counts / counts.sum(axis=-1, keepdims=True)
    return found
