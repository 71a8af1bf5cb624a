"""Quality of scores as weighted sums over rows that are sorted once, for any number of weightings.

A weighting says how often each cluster of rows counts: all once is the estimate, the draws of a
bootstrap are its replicates. One metric, one column of the result; `METRICS` names them.
"""

from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]

METRICS = ("auc", "pr_auc", "brier", "log_loss", "calibration_error", "excess_brier")
LOWEST_PROBABILITY = 1e-7  # a 32-bit score of exactly 0 or 1 has a finite log loss
BLOCK_STEPS = 512  # with some hundred weightings, a block fits in a processor's cache


class RankedRows:
    """Labels, scores and clusters of some rows, in order of falling score, ready to be weighted.

    - AUC: share of (positive, negative) pairs in which the positive scores higher, ties half
      (Mann and Whitney, 1947), as the area under the ROC curve by trapezoids.
    - PR-AUC: average precision, the sum over thresholds of precision times gained recall.
    - Brier score: mean of (score - label) squared. Log loss: mean, in nats.
    - Calibration error: expected calibration error (Naeini, Cooper and Hauskrecht, 2015) over bins
      of equally many rows, equal scores in one bin; the bins stay while the weights change.
    - Excess Brier: Brier score minus the mean of p (1 - p), which it would be if the scores were
      true probabilities; the numerator of Spiegelhalter's (1986) test.

    Args:
        labels: 0 or 1, shape (rows,).
        scores: probabilities of label 1, shape (rows,).
        clusters: number of each row's cluster, 0 to num_clusters - 1, shape (rows,).
        num_bins: bins of the calibration error.
    """

    metrics: ClassVar = METRICS

    def __init__(
        self,
        labels: NDArray[Any],
        scores: NDArray[np.floating[Any]],
        clusters: NDArray[np.intp],
        num_bins: int,
    ) -> None:
        order = np.argsort(-scores, kind="stable")
        self.labels = labels[order].astype(np.float64)
        self.scores = scores[order].astype(np.float64)
        self._clusters = clusters[order]
        self._num_clusters = int(clusters.max(initial=-1)) + 1
        starts = np.flatnonzero(np.diff(self.scores, prepend=np.inf))
        sizes = np.diff(starts, append=len(order))
        self._tie_ends = starts + sizes - 1
        has_positive = np.logical_or.reduceat(self.labels, starts)
        self._step: NDArray[np.intp] = np.repeat(np.cumsum(has_positive) - has_positive, sizes)
        self._num_steps = int(np.count_nonzero(has_positive))
        self.bins = np.repeat(starts, sizes) * num_bins // max(len(order), 1)
        self._num_bins = num_bins
        self._sums = self._cluster_sums()
        self._residuals = self._cluster_residuals()

    @property
    def base_rate(self) -> float:
        """Share of label 1."""
        return float(self.labels.mean())

    def estimate(self) -> Float64Array:
        """Each of `METRICS` with every row counted once, shape (metrics,)."""
        estimates: Float64Array = self.measure(np.ones((1, self._num_clusters)))[0]
        return estimates

    def measure(self, weights: Float64Array) -> Float64Array:
        """Each of `METRICS` under each weighting.

        Args:
            weights: how often each cluster counts, shape (weightings, clusters).

        Returns:
            Shape (weightings, metrics). AUC and PR-AUC are NaN where only one label has weight.
        """
        mass, positives, brier, log_loss, promised = (weights @ self._sums).T
        errors = np.abs(weights @ self._residuals).sum(axis=1)
        with np.errstate(invalid="ignore"):  # 0 / 0 where a label has no weight
            ranked = (self.auc(weights), self._gained(weights) / positives)
        return np.column_stack(
            [*ranked, brier / mass, log_loss / mass, errors / mass, (brier - promised) / mass]
        )

    def auc(self, weights: Float64Array) -> Float64Array:
        """The AUC alone under each weighting, shape (weightings,); NaN as in `measure`.

        A pair counts as often as the product of its rows' weights, so the pairs of two clusters
        are counted once for all weightings.
        """
        mass, positives = (weights @ self._sums[:, :2]).T
        lost = ((weights @ self._lost_pairs) * weights).sum(axis=1)
        with np.errstate(invalid="ignore"):
            areas: Float64Array = 1 - lost / (positives * (mass - positives))
        return areas

    def curve(self) -> tuple[Float64Array, Float64Array]:
        """True and false positives at every distinct score, from the highest down, (0, 0) first."""
        true = np.concatenate([[0.0], np.cumsum(self.labels)[self._tie_ends]])
        return true, np.concatenate([[0.0], self._tie_ends + 1.0]) - true

    @cached_property
    def _lost_pairs(self) -> Float64Array:
        """Pairs that the negative wins, ties half: cluster of the positive, of the negative."""
        is_positive, rising = self.labels > 0, -self.scores
        positives, of_positives = rising[is_positive], self._clusters[is_positive]
        lost = np.zeros((self._num_clusters, self._num_clusters))
        for cluster in range(self._num_clusters):
            negatives = rising[~is_positive & (self._clusters == cluster)]
            above, down_to = (np.searchsorted(negatives, positives, s) for s in ("left", "right"))
            lost[:, cluster] = np.bincount(
                of_positives, (above + down_to) / 2, minlength=self._num_clusters
            )
        return lost

    def _gained(self, weights: Float64Array) -> Float64Array:
        """Recall gained times precision, not yet divided by the positives.

        It changes only at the distinct scores that positives have: the steps. True and false
        positives at a block of steps are one matrix product, exact because all are whole numbers.
        """
        gained, true = np.zeros(len(weights)), np.zeros((len(weights), 1))
        negatives_before = np.zeros(self._num_clusters)
        for first in range(0, self._num_steps, BLOCK_STEPS):
            positive, negative = self._count_block(first)
            negative = negative.cumsum(axis=0) + negatives_before
            negatives_before = negative[-1]
            gain = weights @ positive.T
            reached = true + gain.cumsum(axis=1)
            true, false = reached[:, -1:], weights @ negative.T
            # A step without weight gains nothing, whatever stands for its precision.
            gained += np.einsum("rs,rs->r", gain, reached / np.maximum(reached + false, 1.0))
        return gained

    def _count_block(self, first: int) -> tuple[Float64Array, Float64Array]:
        """Positives and negatives of a block of steps by cluster, each (steps, clusters).

        A negative belongs to the first step at or below its score.
        """
        after = min(first + BLOCK_STEPS, self._num_steps)
        start, end = np.searchsorted(self._step, [first, after])
        cells = (self._step[start:end] - first) * self._num_clusters + self._clusters[start:end]
        shape = (after - first, self._num_clusters)

        def count(rows: Float64Array) -> Float64Array:
            return np.bincount(cells, rows, shape[0] * shape[1]).astype(np.float64).reshape(shape)

        positive = self.labels[start:end]
        return count(positive), count(1 - positive)

    def _cluster_sums(self) -> Float64Array:
        squared = (self.scores - self.labels) ** 2
        p = np.clip(self.scores, LOWEST_PROBABILITY, 1 - LOWEST_PROBABILITY)
        losses = -np.where(self.labels > 0, np.log(p), np.log1p(-p))
        promised = self.scores * (1 - self.scores)
        columns = (np.ones(len(self.labels)), self.labels, squared, losses, promised)
        sums = [np.bincount(self._clusters, c, self._num_clusters) for c in columns]
        return np.array(sums, dtype=np.float64).T

    def _cluster_residuals(self) -> Float64Array:
        cells = self._clusters * self._num_bins + self.bins
        shape = (self._num_clusters, self._num_bins)
        sums = np.bincount(cells, self.labels - self.scores, shape[0] * shape[1])
        return sums.astype(np.float64).reshape(shape)


class RankedClasses:
    """Rows of several classes, each class against the rest; measured as `RankedRows` are.

    AUC, PR-AUC and calibration error are means over the classes, which count alike however rare
    they are: the AUC is `roc_auc_score(multi_class="ovr", average="macro")` of scikit-learn, the
    calibration error the class-wise one of Kull et al. (2019). Brier score (as Brier, 1950, wrote
    it) and excess are sums over the classes. The log loss is that of the true class's probability.

    Args:
        labels: numbers of classes, shape (rows,).
        scores: probabilities, shape (rows, classes).
        clusters, num_bins: as those of `RankedRows`.
    """

    metrics: ClassVar = METRICS

    def __init__(
        self,
        labels: NDArray[Any],
        scores: NDArray[np.floating[Any]],
        clusters: NDArray[np.intp],
        num_bins: int,
    ) -> None:
        self.labels = labels.astype(np.intp)
        self._scores = scores
        of_class = np.arange(scores.shape[1])
        self.classes = [
            RankedRows(self.labels == k, scores[:, k], clusters, num_bins) for k in of_class
        ]
        true = np.take_along_axis(scores, self.labels[:, None], 1)[:, 0].astype(np.float64)
        losses = -np.log(np.clip(true, LOWEST_PROBABILITY, 1))
        self._losses = np.column_stack([np.bincount(clusters), np.bincount(clusters, losses)])

    @property
    def base_rate(self) -> float:
        """Share of the most frequent class."""
        return max(each.base_rate for each in self.classes)

    def stacked(self, num_bins: int) -> RankedRows:
        """Every class of every row as a row of its own, for curves: whether it is the class."""
        true = self.labels[:, None] == np.arange(self._scores.shape[1])
        one = np.zeros(true.size, dtype=np.intp)
        return RankedRows(true.ravel(), self._scores.ravel(), one, num_bins)

    def estimate(self) -> Float64Array:
        """Each of `METRICS` with every row counted once, shape (metrics,)."""
        weights = np.ones((1, len(self._losses)))
        each = np.stack([of_class.measure(weights) for of_class in self.classes])
        estimates: Float64Array = self.together(each, weights)[0]
        return estimates

    def together(self, of_classes: Float64Array, weights: Float64Array) -> Float64Array:
        """Each of `METRICS` of all classes, shape (weightings, metrics).

        Args:
            of_classes: what `measure` gives of each of `classes`, shape (classes, weightings,
                metrics); NaN where a class has no weight.
            weights: the weightings.
        """
        found: Float64Array = of_classes.mean(axis=0)
        for name in ("brier", "excess_brier"):
            found[:, METRICS.index(name)] *= len(of_classes)
        mass, losses = (weights @ self._losses).T
        found[:, METRICS.index("log_loss")] = losses / mass
        return found

    def auc(self, weights: Float64Array) -> Float64Array:
        """The AUC alone under each weighting, shape (weightings,)."""
        areas: Float64Array = np.mean([each.auc(weights) for each in self.classes], axis=0)
        return areas
