"""Quality of predicted numbers: weighted sums over clusters of rows, as `ranked` has of scores.

- R2: 1 minus the squared errors over those of the labels' own mean.
- RMSE, MAE and bias: root of the mean squared error, mean absolute error, mean of prediction minus
  label, all in the label's unit.
- Skill: 1 minus the mean squared error over that of a baseline (Murphy, 1988), on the rows where
  that is known; a baseline such as the last known value is what needs no model at all.
"""

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]

METRICS = ("r2", "rmse", "mae", "bias", "skill")


class PredictedRows:
    """Labels, predictions and clusters of some rows, ready to be weighted.

    Args:
        labels: shape (rows,).
        predictions: in the labels' unit, shape (rows,).
        baseline: the plainest prediction, NaN where it is not known, shape (rows,); None for none.
        clusters: number of each row's cluster, 0 to num_clusters - 1, shape (rows,).
    """

    metrics: ClassVar = METRICS

    def __init__(
        self,
        labels: NDArray[Any],
        predictions: NDArray[Any],
        baseline: NDArray[Any] | None,
        clusters: NDArray[np.intp],
    ) -> None:
        self.labels = labels.astype(np.float64)
        self.errors = predictions.astype(np.float64) - self.labels
        self._clusters = clusters
        self._num_clusters = int(clusters.max(initial=-1)) + 1
        centred = self.labels - self.labels.mean()
        columns = [np.ones(len(labels)), self.errors**2, np.abs(self.errors), self.errors]
        columns += [centred, centred**2, *self._against(baseline)]
        sums = [np.bincount(clusters, c, self._num_clusters) for c in columns]
        self._sums = np.array(sums, dtype=np.float64).T

    def _against(self, baseline: NDArray[Any] | None) -> list[Float64Array]:
        """Squared errors of prediction and baseline where the baseline is known, else 0."""
        if baseline is None:
            return [np.zeros(len(self.labels))] * 2
        errors = baseline.astype(np.float64) - self.labels
        known = np.isfinite(errors)
        return [np.where(known, self.errors, 0.0) ** 2, np.where(known, errors, 0.0) ** 2]

    def estimate(self) -> Float64Array:
        """Each of `METRICS` with every row counted once, shape (metrics,)."""
        estimates: Float64Array = self.measure(np.ones((1, self._num_clusters)))[0]
        return estimates

    def measure(self, weights: Float64Array) -> Float64Array:
        """Each of `METRICS` under each weighting.

        Args:
            weights: how often each cluster counts, shape (weightings, clusters).

        Returns:
            Shape (weightings, metrics). R2 is NaN where the labels do not differ, the skill where
            no baseline is known or it never errs.
        """
        mass, squared, absolute, signed, labels, squares, own, other = (weights @ self._sums).T
        mean = squared / mass
        with np.errstate(invalid="ignore", divide="ignore"):
            r2 = 1 - mean / (squares / mass - (labels / mass) ** 2)
            skill = np.where(other > 0, 1 - own / other, np.nan)
        r2 = np.where(np.isfinite(r2), r2, np.nan)
        return np.column_stack([r2, np.sqrt(mean), absolute / mass, signed / mass, skill])
