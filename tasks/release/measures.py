"""Sequential tests of counts and of score distributions, right at any moment.

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

What labels say of two versions: differences in [-1, 1] whose mean is the candidate's loss.

A version's AUC is the probability that a row of the positive class scores above one of the
negative class (ties half). Rows are taken in units, in the order in which labels became known: a
unit ends as soon as it has `NUM_OF_EACH` rows of both classes. A unit's own AUC has the version's
AUC as its mean, so the difference of two versions on a unit is what `betting` needs: bounded,
independent of the other units, nothing asymptotic. Units of some rows lose little against the AUC
of all rows at once (DeLong et al., Biometrics 44, 1988: lost is the interaction of rows of two
units).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaln
from scipy.stats import rankdata

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
    """

    candidate: Any
    total: Any
    share: float


def log_ratio_evidence(strata: Sequence[Stratum], tolerated: float = 1.0) -> Any:
    """Log E_t against "the candidate fails at most `tolerated` times as often".

    Args:
        strata: one for each split there was; they may be empty.
        tolerated: ratio that counts as no harm, at least 1 for two alike versions to be that.

    Returns:
        Shape of the counts; 0.0 without events.
    """
    base = np.zeros(np.shape(strata[0].total) if strata else ())
    by_ratio = [
        sum((_log_wealth(stratum, tolerated, factor) for stratum in strata), start=base)
        for factor in FACTORS
    ]
    found = np.logaddexp.reduce(np.stack(by_ratio), axis=0) - np.log(len(FACTORS))
    return float(found) if found.ndim == 0 else found


def _log_wealth(stratum: Stratum, tolerated: float, factor: float) -> Any:
    """Log of what a bet on `factor` times the tolerated ratio has become in one stratum."""
    null, other = (_theta(stratum.share, ratio) for ratio in (tolerated, tolerated * factor))
    mine, total = np.asarray(stratum.candidate), np.asarray(stratum.total)
    return mine * np.log(other / null) + (total - mine) * np.log((1 - other) / (1 - null))


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
    exchanged = [Stratum(s.total - s.candidate, s.total, 1 - s.share) for s in strata]
    above = _lower(exchanged, alpha)
    return _lower(strata, alpha), (1 / above if above > 0 else float("inf"))


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


NUM_OF_EACH = 4
"""Rows of each class that a unit has at least. More of them: less noise, but a bet can only be so
bold."""
NUM_FIRST = 200
"""Labelled rows that settle where a loss is cut off."""
CUT = 6.0
"""Losses are cut off at this many times the stable version's median loss of the first rows."""


@dataclass(frozen=True)
class Labelled:
    """Rows with a label, in the order in which their labels became known.

    Attributes:
        labels: 0 or 1 for a classification, any number for a regression; shape (n,).
        scores: of one version, same shape.
    """

    labels: FloatArray
    scores: FloatArray

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.labels)


def unit_ends(labels: FloatArray) -> list[int]:
    """Where each whole unit ends: as soon as it has `NUM_OF_EACH` rows of both classes.

    Decided by the labels alone, so a unit's AUC has the version's AUC as its mean whatever its size
    is; rows that fill no unit yet are left for later.
    """
    ends, counts = [], [0, 0]
    for position, is_positive in enumerate((labels > 0).tolist()):
        counts[is_positive] += 1
        if min(counts) >= NUM_OF_EACH:
            ends.append(position + 1)
            counts = [0, 0]
    return ends


def unit_aucs(labels: FloatArray, scores: FloatArray) -> FloatArray:
    """AUC of each whole unit.

    Args:
        labels: shape (n,).
        scores: shape (..., n); leading axes are versions or cases with the same labels.

    Returns:
        Shape (..., units).
    """
    ends = unit_ends(labels)
    found: FloatArray = np.empty((*scores.shape[:-1], len(ends)))
    is_positive = labels > 0
    for unit, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        part, mask = scores[..., start:end], is_positive[start:end]
        high, low = part[..., mask, None], part[..., None, ~mask]
        found[..., unit] = ((high > low) + 0.5 * (high == low)).mean(axis=(-1, -2))
    return found


def paired_auc_losses(labels: FloatArray, stable: FloatArray, candidate: FloatArray) -> FloatArray:
    """AUC that the candidate loses, unit by unit, where both versions scored the same rows."""
    of_stable, of_candidate = unit_aucs(labels, np.stack([stable, candidate]))
    found: FloatArray = of_stable - of_candidate
    return found


def unpaired_auc_losses(stable: Labelled, candidate: Labelled, share: float) -> FloatArray:
    """AUC that the candidate loses, where each version scored rows of its own.

    The version with more traffic is averaged over so many units for each one of the other as the
    split gives it.

    Args:
        stable: its rows.
        candidate: its rows.
        share: of the traffic, that the candidate got.
    """
    aucs = [unit_aucs(v.labels, v.scores) for v in (stable, candidate)]
    return _difference_of_means(aucs[0], aucs[1], share)


def _difference_of_means(stable: FloatArray, candidate: FloatArray, share: float) -> FloatArray:
    per_candidate = max(1, int((1 - share) / share + 1e-9))
    per_stable = max(1, int(share / (1 - share) + 1e-9)) if share < 1 else 1
    groups = [_group_means(stable, per_candidate), _group_means(candidate, per_stable)]
    num_groups = min(len(group) for group in groups)
    return groups[0][:num_groups] - groups[1][:num_groups]


def _group_means(values: FloatArray, size: int) -> FloatArray:
    whole = len(values) // size * size
    means: FloatArray = values[:whole].reshape(-1, size).mean(axis=1)
    return means


def capped_losses(labelled: Labelled, cut: float) -> FloatArray:
    """Absolute errors over the cut, at most 1."""
    found: FloatArray = np.minimum(np.abs(labelled.labels - labelled.scores) / cut, 1.0)
    return found


def paired_error_losses(
    labels: FloatArray, stable: FloatArray, candidate: FloatArray
) -> FloatArray:
    """How much farther off the candidate is, row by row, as a share of the cut.

    The cut is settled by the first rows, which are left out.
    """
    if len(labels) <= NUM_FIRST:
        return np.empty(0)
    cut = error_cut(Labelled(labels, stable))
    rest = slice(NUM_FIRST, None)
    return capped_losses(Labelled(labels[rest], candidate[rest]), cut) - capped_losses(
        Labelled(labels[rest], stable[rest]), cut
    )


def unpaired_error_losses(stable: Labelled, candidate: Labelled, share: float) -> FloatArray:
    """How much farther off the candidate is, where each version scored rows of its own."""
    if len(stable) <= NUM_FIRST:
        return np.empty(0)
    cut = error_cut(stable)
    rest = Labelled(stable.labels[NUM_FIRST:], stable.scores[NUM_FIRST:])
    return -_difference_of_means(capped_losses(rest, cut), capped_losses(candidate, cut), share)


def error_cut(stable: Labelled) -> float:
    """Loss above which a row counts no more, from the stable version's first rows."""
    median = float(np.median(np.abs(stable.labels[:NUM_FIRST] - stable.scores[:NUM_FIRST])))
    return max(median * CUT, float(np.finfo(float).tiny))


def auc(labels: FloatArray, scores: FloatArray) -> float:
    """AUC of all rows, ties half; NaN where a class is missing."""
    is_positive = labels > 0
    positive = int(is_positive.sum())
    negative = len(labels) - positive
    if not positive or not negative:
        return float("nan")
    ranks = float(rankdata(scores)[is_positive].sum())
    return (ranks - positive * (positive + 1) / 2) / (positive * negative)
