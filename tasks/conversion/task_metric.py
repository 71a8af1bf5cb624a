"""What a conversion does to the task metric: AUC of the variant minus AUC of its source."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.contracts import Metric
from tasks.conversion.rows import LabelledRows
from tasks.errors import DataContractError

FloatArray = NDArray[np.floating[Any]]


class PairedAuc:
    """AUC of any number of models on the same rows, over the same bootstrap replicates of days.

    Rows of one day resemble each other, so whole days are drawn, with replacement.

    The AUC is the share of (positive, negative) pairs in which the positive has the higher score,
    ties counting half (Mann and Whitney, 1947). Won pairs are counted once for each pair of days:
    W[a, b] with the positive on day a and the negative on day b. A replicate that holds each day
    n[day] times has won n' W n pairs. So 1000 replicates cost one matrix product, and are exact.

    Args:
        rows: labels and days.
        replicates: how many.
        seed: of the draws.

    Raises:
        DataContractError: there are only positives or only negatives.
    """

    def __init__(self, rows: LabelledRows, replicates: int, seed: int) -> None:
        self._labels = rows.labels
        days, self._day = np.unique(rows.days, return_inverse=True)
        self._num_days = len(days)
        positives = int(np.count_nonzero(rows.labels))
        if positives in (0, len(rows.labels)):
            raise DataContractError(
                f"the test window has {positives} positive labels in {len(rows.labels)} rows, so "
                "AUC is undefined; expected both labels. Choose a longer test window"
            )
        draws = np.random.default_rng(seed).multinomial(
            self._num_days, np.full(self._num_days, 1 / self._num_days), size=replicates
        )
        self._weights = np.vstack([np.ones(self._num_days), draws])  # first: the rows as they are

    def change(self, source: FloatArray, variant: FloatArray) -> Metric:
        """AUC of `variant` minus AUC of `source`, with its 95 % interval.

        Both are scores of the rows, shape (rows,), in their order. With a single day there is
        nothing to draw, and the interval is the value.
        """
        changes = self._replicates(variant) - self._replicates(source)
        drawn = changes[1:][np.isfinite(changes[1:])]  # a draw without one of the labels has no AUC
        low, high = np.quantile(drawn, [0.025, 0.975]) if len(drawn) else (changes[0], changes[0])
        return Metric(value=float(changes[0]), low=float(low), high=float(high))

    def _replicates(self, scores: FloatArray) -> NDArray[np.float64]:
        won = self._pairs_won(scores)
        positives, negatives = (
            np.bincount(self._day[chosen], minlength=self._num_days)
            for chosen in (self._labels, ~self._labels)
        )
        weights = self._weights
        pairs = (weights @ positives) * (weights @ negatives)
        with np.errstate(invalid="ignore"):
            auc: NDArray[np.float64] = np.einsum(
                "ra,ab,rb->r", weights, won, weights, optimize=True
            )
            return auc / pairs

    def _pairs_won(self, scores: FloatArray) -> NDArray[np.float64]:
        """W[a, b]: pairs won by positives of day a against negatives of day b, ties half."""
        positive_scores, positive_days = scores[self._labels], self._day[self._labels]
        negative_scores, negative_days = scores[~self._labels], self._day[~self._labels]
        won = np.zeros((self._num_days, self._num_days))
        for day in range(self._num_days):
            rivals = np.sort(negative_scores[negative_days == day])
            beaten = np.searchsorted(rivals, positive_scores, side="left")
            tied_or_beaten = np.searchsorted(rivals, positive_scores, side="right")
            won[:, day] = np.bincount(
                positive_days, weights=(beaten + tied_or_beaten) / 2, minlength=self._num_days
            )
        return won
