"""What a conversion does to the task metric: AUC or R2 of the variant minus that of its source."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tasks.contracts.data import TaskKind
from tasks.contracts.evaluation import Metric
from tasks.conversion.kinds.tabular_rows import LabelledRows
from tasks.kernel.errors import DataContractError

FloatArray = NDArray[np.floating[Any]]


class PairedQuality(Protocol):
    """Quality of any number of models on the same rows, over the same bootstrap replicates."""

    def change(self, source: FloatArray, variant: FloatArray) -> Metric:
        """Quality of `variant` minus that of `source`, with its 95 % interval."""


def paired_quality(task: TaskKind, rows: LabelledRows, replicates: int, seed: int) -> PairedQuality:
    """The metric of the task: AUC of a classification, R2 of a regression.

    Raises:
        DataContractError: the labels do not differ.
    """
    kind = PairedR2 if task == "regression" else PairedAuc
    return kind(rows, replicates, seed)


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
        self._weights = _weights(self._num_days, replicates, seed)

    def change(self, source: FloatArray, variant: FloatArray) -> Metric:
        """AUC of `variant` minus AUC of `source`, with its 95 % interval.

        Both are scores of the rows, shape (rows,), in their order. With a single day there is
        nothing to draw, and the interval is the value.
        """
        return _interval(self._replicates(variant) - self._replicates(source))

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


class PairedR2:
    """R2 of any number of models on the same rows, over the same bootstrap replicates of days.

    Args:
        rows: labels and days.
        replicates: how many.
        seed: of the draws.

    Raises:
        DataContractError: all labels are equal.
    """

    def __init__(self, rows: LabelledRows, replicates: int, seed: int) -> None:
        days, self._day = np.unique(rows.days, return_inverse=True)
        self._num_days = len(days)
        self._labels = rows.labels - rows.labels.mean()
        self._mean = float(rows.labels.mean())
        if not np.any(self._labels):
            raise DataContractError(
                f"the test window has the label {self._mean:g} in all of {len(rows.labels)} rows, "
                "so R2 is undefined; expected labels that differ. Choose a longer test window"
            )
        self._weights = _weights(self._num_days, replicates, seed)
        sums = [self._by_day(v) for v in (np.ones(len(self._labels)), self._labels)]
        mass, total = (self._weights @ s for s in sums)
        self._spread = self._weights @ self._by_day(self._labels**2) - total**2 / mass

    def change(self, source: FloatArray, variant: FloatArray) -> Metric:
        """R2 of `variant` minus R2 of `source`, as `PairedAuc.change`."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return _interval((self._squares(source) - self._squares(variant)) / self._spread)

    def _squares(self, predictions: FloatArray) -> NDArray[np.float64]:
        errors = predictions.astype(np.float64) - self._mean - self._labels
        squares: NDArray[np.float64] = self._weights @ self._by_day(errors**2)
        return squares

    def _by_day(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = np.bincount(
            self._day, weights=values, minlength=self._num_days
        ).astype(np.float64)
        return sums


def _weights(num_days: int, replicates: int, seed: int) -> NDArray[np.float64]:
    """How often each day counts: first all once, then the draws, shape (1 + replicates, days)."""
    draws = np.random.default_rng(seed).multinomial(
        num_days, np.full(num_days, 1 / num_days), size=replicates
    )
    return np.vstack([np.ones(num_days), draws])


def _interval(changes: NDArray[np.float64]) -> Metric:
    drawn = changes[1:][np.isfinite(changes[1:])]  # a draw whose labels do not differ has none
    low, high = np.quantile(drawn, [0.025, 0.975]) if len(drawn) else (changes[0], changes[0])
    return Metric(value=float(changes[0]), low=float(low), high=float(high))
