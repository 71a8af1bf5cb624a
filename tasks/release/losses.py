"""What labels say of two versions: differences in [-1, 1] whose mean is the candidate's loss.

A version's AUC is the probability that a row of the positive class scores above one of the
negative class (ties half). Rows are taken in units, in the order in which labels became known: a
unit ends as soon as it has `NUM_OF_EACH` rows of both classes. A unit's own AUC has the version's
AUC as its mean, so the difference of two versions on a unit is what `betting` needs: bounded,
independent of the other units, nothing asymptotic. Units of some rows lose little against the AUC
of all rows at once (DeLong et al., Biometrics 44, 1988: lost is the interaction of rows of two
units).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[Any]
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
    from scipy.stats import rankdata

    is_positive = labels > 0
    positive = int(is_positive.sum())
    negative = len(labels) - positive
    if not positive or not negative:
        return float("nan")
    ranks = float(rankdata(scores)[is_positive].sum())
    return (ranks - positive * (positive + 1) / 2) / (positive * negative)
