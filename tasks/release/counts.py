"""Sequential tests of counts and of score distributions, right at every look.

Whose requests fail or are slow, given that one is; and is the split as asked?

Where a request is the candidate's with known probability `p`, whatever happened before, and both
versions fail alike, then an event (a failed request, a slow one) is the candidate's with
probability `p` too, however the rate of events moves: a broken feed or a slow disk that strikes
both moves nothing. So what is tested is whose the events are, one at a time, at any time:
Lindon and Malek, "Anytime-valid inference for multinomial count data", NeurIPS 35 (2022). With
`t(r) = p r / (1 - p + p r)` for a candidate that fails `r` times as often, and `x` of `n`
events the candidate's in a stratum of one `p`,

    E_t = sum_j w_j prod_strata (t(r_j) / t(r_0))^x ((1 - t(r_j)) / (1 - t(r_0)))^(n-x)

over ratios `r_j > r_0`. While the true ratio is at most `r_0`, each factor has mean at most 1 (the
likelihood ratio grows with x), so E_t is a supermartingale and Ville's inequality bounds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaln

FloatArray = NDArray[Any]
FACTORS: FloatArray = np.exp(np.linspace(np.log(1.15), np.log(300.0), 24))
"""Ratios above the tolerated one that are bet on side by side, equally."""
_HALVINGS = 40
_MOST = 1e4


@dataclass(frozen=True)
class Stratum:
    """Events while one split held.

    Attributes:
        candidate: events of the candidate; an array holds many cases at once.
        total: events of both versions, same shape.
        share: probability that an event is the candidate's if both are alike, in (0, 1).
        also: events of the same requests, seen in another way: in pairs where this one has those
            of a split. One event may be in both, so the product of both would bet twice on it and
            be no supermartingale; half of the wealth is bet on each.
    """

    candidate: Any
    total: Any
    share: float
    also: Stratum | None = None


def views(strata: Sequence[Stratum]) -> list[Stratum]:
    """All strata, those that see the requests of another one too."""
    return [view for s in strata for view in (s, s.also) if view is not None]


def log_ratio_evidence(strata: Sequence[Stratum], tolerated: float = 1.0) -> Any:
    """Log E_t against "the candidate fails at most `tolerated` times as often".

    Args:
        strata: one for each split there was; they may be empty.
        tolerated: ratio that counts as no harm, at least 1 for two alike versions to be that.

    Returns:
        Shape of the counts; 0.0 without events.
    """
    base = np.zeros(np.shape(strata[0].total) if strata else ())
    by_ratio = [base for _ in FACTORS]
    for stratum in strata:
        for number, factor in enumerate(FACTORS):
            by_ratio[number] = by_ratio[number] + _log_wealth(stratum, tolerated, factor)
    found = np.logaddexp.reduce(np.stack(by_ratio), axis=0) - np.log(len(FACTORS))
    return float(found) if found.ndim == 0 else found


def _log_wealth(stratum: Stratum, tolerated: float, factor: float) -> Any:
    """Log of what a bet on `factor` times the tolerated ratio has become in one stratum."""
    null, other = (_theta(stratum.share, ratio) for ratio in (tolerated, tolerated * factor))
    found = np.asarray(stratum.candidate) * np.log(other / null) + (
        np.asarray(stratum.total) - stratum.candidate
    ) * np.log((1 - other) / (1 - null))
    if stratum.also is None:
        return found
    return np.logaddexp(found, _log_wealth(stratum.also, tolerated, factor)) - np.log(2)


def ratio_bounds(strata: Sequence[Stratum], alpha: float) -> tuple[float, float]:
    """Bounds on how many times as often the candidate fails, each right at all times.

    The lower bound is the largest tolerated ratio that is refuted at `alpha`; the upper one is the
    same with the two versions exchanged.

    Args:
        strata: as above.
        alpha: of each bound.

    Returns:
        Lower and upper bound; 0 and infinity where nothing is known.
    """
    above = _lower([_exchanged(stratum) for stratum in strata], alpha)
    return _lower(strata, alpha), (1 / above if above > 0 else float("inf"))


def _exchanged(stratum: Stratum) -> Stratum:
    also = None if stratum.also is None else _exchanged(stratum.also)
    return Stratum(stratum.total - stratum.candidate, stratum.total, 1 - stratum.share, also)


def _lower(strata: Sequence[Stratum], alpha: float) -> float:
    wanted = np.log(1 / alpha)
    low, high = np.log(1 / _MOST), np.log(_MOST)
    if log_ratio_evidence(strata, 1 / _MOST) < wanted:
        return 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        refuted = log_ratio_evidence(strata, float(np.exp(middle))) >= wanted
        low, high = (middle, high) if refuted else (low, middle)
    return float(np.exp(low))


def _theta(share: float, ratio: float) -> float:
    return share * ratio / (1 - share + share * ratio)


def log_split_evidence(candidate: Any, total: Any, share: float, weight: float = 100.0) -> Any:
    """Log of the evidence that requests are not split as asked (sample ratio mismatch).

    A mixture of binomials around the asked share, by `Beta(w p, w (1 - p))`: the Dirichlet mixture
    of Lindon and Malek (2022), equation 4, for two versions. A martingale while the split is right.

    Args:
        candidate: units (requests, or clients where they stick) that the candidate got.
        total: units of both versions.
        share: the candidate's, as asked, in (0, 1).
        weight: of the prior; large ones look for small deviations.

    Returns:
        Shape of the counts.
    """
    a, b = weight * share, weight * (1 - share)
    x, n = np.asarray(candidate, dtype=float), np.asarray(total, dtype=float)
    found = betaln(a + x, b + n - x) - betaln(a, b) - x * np.log(share) - (n - x) * np.log1p(-share)
    return float(found) if found.ndim == 0 else found


def radius(num_rows: int, alpha: float) -> float:
    """Half width of the band around an empirical distribution; at most 1.

    Howard and Ramdas, "Sequential estimation of quantiles with applications to A/B testing and
    best-arm identification", Bernoulli 28 (2022), corollary 2: for independent draws,

        P(there is a t >= 1 with sup_x |F_t(x) - F(x)|
          > 0.85 sqrt((log log(e t) + 0.8 log(1612 / alpha)) / t)) <= alpha.
    """
    if num_rows < 1:
        return 1.0
    width = np.log(np.log(np.e * num_rows)) + 0.8 * np.log(1612 / alpha)
    return float(min(1.0, 0.85 * np.sqrt(width / num_rows)))


def distance_bounds(
    first: FloatArray, second: FloatArray, alpha: float
) -> tuple[float, float, float]:
    """Largest gap of two distributions (Kolmogorov and Smirnov), with bounds right at all times.

    Returns:
        Lower bound, gap of the drawn values, upper bound; each bound holds with probability
        `1 - alpha`. 0, 0 and 1 where nothing was drawn.
    """
    if not len(first) or not len(second):
        return 0.0, 0.0, 1.0
    reach = radius(len(first), alpha / 2) + radius(len(second), alpha / 2)
    points = np.concatenate([first, second])
    below = [np.searchsorted(np.sort(v), points, side="right") / len(v) for v in (first, second)]
    seen = float(np.abs(below[0] - below[1]).max())
    return max(0.0, seen - reach), seen, min(1.0, seen + reach)
