"""A test by betting: does the mean of bounded differences lie above zero, looked at any time.

The wealth of somebody who bets against "the candidate is not worse" is, while that is true, a
supermartingale from 1, so it ever reaches `1 / alpha` with probability at most `alpha` (Ville's
inequality), however often and whenever anybody looks. Nothing is asymptotic here.

For differences `y` in [-1, 1] whose mean given the past is at most 0, each bet `b` in [0, 1) gives

    W_t(b) = prod_{i <= t} (1 + b y_i),        E_t = (1 / J) sum_j W_t(b_j).

Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS-B 86
(2024), section 4 (capital processes) and appendix B (mixtures of bets); the mixture is Cover's
universal portfolio as in Orabona and Jun, IEEE Trans. Inf. Theory 70 (2024).

A change that begins at an unknown moment is another question: `change_wealth` begins to bet anew
after every observation.
"""

from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[Any]
BETS: FloatArray = np.array([0.02, 0.05, 0.1, 0.18, 0.28, 0.42, 0.6, 0.85])
"""Fractions of the wealth that are bet side by side; small ones find small effects in many rows."""
CHANGE_BETS: FloatArray = np.array([0.05, 0.1, 0.2, 0.4, 0.7])
_HALVINGS = 40


def log_wealth(differences: FloatArray) -> FloatArray:
    """Logarithm of the wealth after each difference.

    Args:
        differences: in [-1, 1], shape (..., n), in the order in which they became known; positive
            where the candidate did worse.

    Returns:
        log E_t, same shape. It is the same supermartingale wherever one stops reading it.
    """
    each = (np.cumsum(np.log1p(bet * differences), axis=-1) for bet in BETS)
    found: FloatArray = reduce(np.logaddexp, each) - np.log(len(BETS))
    return found


def final_log_wealth(differences: FloatArray, tolerated: float = 0.0) -> float:
    """Logarithm of the wealth after the last difference, against "the mean is at most `tolerated`".

    0.0 where there is no difference yet.
    """
    values, counts = np.unique(differences, return_counts=True)
    shifted = (values - tolerated) / (1 + tolerated)
    each = np.log1p(np.multiply.outer(BETS, shifted)) @ counts
    return float(np.logaddexp.reduce(each) - np.log(len(BETS)))


def change_wealth(values: FloatArray) -> FloatArray:
    """Logarithm of the wealth of all who began to bet, one after each observation.

    The Shiryaev-Roberts e-detector of Shin, Ramdas and Rinaldo, "E-detectors: a nonparametric
    framework for sequential change detection", New England Journal of Statistics in Data Science
    (2024): `R_t(b) = (1 + R_{t-1}(b)) (1 + b y_t)`, averaged over bets and columns. While the mean
    of every column given the past is at most 0, `R_t - t` is a supermartingale. So `R` reaches `c`
    within `n` observations with probability at most `n / c`, and after `c` of them on average at
    the earliest, whenever anybody looks.

    Args:
        values: in [-1, 1], one column for each direction of a change, shape (n, columns).

    Returns:
        log R_t, shape (n,).
    """
    wealth, found = np.full((values.shape[1], len(CHANGE_BETS)), -np.inf), np.empty(len(values))
    for number, value in enumerate(values):
        wealth = np.logaddexp(0.0, wealth) + np.log1p(np.multiply.outer(value, CHANGE_BETS))
        found[number] = np.logaddexp.reduce(wealth, axis=None) - np.log(wealth.size)
    return found


def mean_bounds(differences: FloatArray, alpha: float) -> tuple[float, float]:
    """Bounds on the mean of differences, each right at all times with probability `1 - alpha`.

    The lower bound is the largest `m` against which betting has reached `1 / alpha`: for values in
    [-1, 1], `1 + b (y - m) / (1 + m)` is a factor of the wealth against "the mean is at most m".
    The lower bound is above 0 exactly where `final_log_wealth` is at least `log(1 / alpha)`.

    Args:
        differences: in [-1, 1], shape (n,).
        alpha: of each bound.

    Returns:
        Lower and upper bound in [-1, 1].
    """
    return _lower(differences, alpha), -_lower(-np.asarray(differences), alpha)


def _lower(differences: FloatArray, alpha: float) -> float:
    wanted = np.log(1 / alpha)
    low, high = -1.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if final_log_wealth(differences, middle) >= wanted:
            low = middle
        else:
            high = middle
    return low
