"""How far two score distributions are apart, with a bound that holds at all times.

Howard and Ramdas, "Sequential estimation of quantiles with applications to A/B testing and
best-arm identification", Bernoulli 28 (2022), corollary 2: for independent draws,

    P(there is a t >= 1 with sup_x |F_t(x) - F(x)| > 0.85 sqrt((log log(e t) + 0.8 log(1612 / alpha)) / t)) <= alpha.
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[Any]


def radius(num_rows: int, alpha: float) -> float:
    """Half width of the band around an empirical distribution; at most 1."""
    if num_rows < 1:
        return 1.0
    width = np.log(np.log(np.e * num_rows)) + 0.8 * np.log(1612 / alpha)
    return float(min(1.0, 0.85 * np.sqrt(width / num_rows)))


def distance(first: FloatArray, second: FloatArray) -> float:
    """Largest gap between two empirical distributions (Kolmogorov and Smirnov); 0.0 for none."""
    if not len(first) or not len(second):
        return 0.0
    points = np.unique(np.concatenate([first, second]))
    below = [np.searchsorted(np.sort(v), points, side="right") / len(v) for v in (first, second)]
    return float(np.abs(below[0] - below[1]).max())


def distance_bounds(first: FloatArray, second: FloatArray, alpha: float) -> tuple[float, float]:
    """Bounds on the true distance, each right at all times with probability `1 - alpha`."""
    reach = radius(len(first), alpha / 2) + radius(len(second), alpha / 2)
    seen = distance(first, second)
    return max(0.0, seen - reach), min(1.0, seen + reach)
