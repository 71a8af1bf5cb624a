"""What a network is trained for: the loss of a row, and the quality by which epochs are compared.

Quality is made of totals over rows, which ranks simply add up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tasks.training.data.preprocess import LabelScale, Preprocessing
from tasks.training.metrics import (
    NUM_SCORE_BINS,
    explained_share,
    histogram_auc,
    score_histograms,
    squared_sums,
)
from tasks.training.strategies.base import RowLosses

Float64Array = NDArray[np.float64]
HUBER_DELTA = 1.0
"""Standard deviations of the label beyond which an error counts by its size, not its square."""


class Objective(ABC):
    """Loss and quality of one kind of task."""

    num_totals: int
    row_losses: RowLosses

    @abstractmethod
    def totals(self, outputs: Tensor, labels: Tensor) -> Float64Array:
        """What some validation rows add to the quality, shape (num_totals,).

        Args:
            outputs: of the network, shape (rows,), on the CPU.
            labels: shape (rows,), on the CPU.
        """

    @abstractmethod
    def quality(self, totals: Float64Array) -> dict[str, float]:
        """Field of `EpochMetrics` to value, from the totals of all rows."""


class Classification(Objective):
    """Outputs are logits: cross-entropy, judged by AUC.

    Not by the loss: a base rate that moves between the windows shifts it at random.
    """

    num_totals = 2 * NUM_SCORE_BINS

    def __init__(self) -> None:
        self.row_losses = partial(functional.binary_cross_entropy_with_logits, reduction="none")

    def totals(self, outputs: Tensor, labels: Tensor) -> Float64Array:
        """Two histograms of scores."""
        scores = torch.sigmoid(outputs).nan_to_num()  # what is no number shows in the loss
        return score_histograms(scores.numpy(), labels.numpy()).ravel()

    def quality(self, totals: Float64Array) -> dict[str, float]:
        """AUC."""
        return {"validation_auc": histogram_auc(totals.reshape(2, -1))}


class Regression(Objective):
    """Outputs are standardised predictions: Huber loss, judged by R2."""

    num_totals = 4

    def __init__(self, scale: LabelScale) -> None:
        self._scale = scale
        self.row_losses = self._huber

    def _huber(self, outputs: Tensor, labels: Tensor) -> Tensor:
        standardised = (labels - self._scale.mean) / self._scale.deviation
        return functional.huber_loss(outputs, standardised, reduction="none", delta=HUBER_DELTA)

    def totals(self, outputs: Tensor, labels: Tensor) -> Float64Array:
        """Squared errors, labels, squared labels (standardised) and rows."""
        standardised = (labels.double() - self._scale.mean) / self._scale.deviation
        return squared_sums(outputs.double().nan_to_num().numpy(), standardised.numpy())

    def quality(self, totals: Float64Array) -> dict[str, float]:
        """R2."""
        return {"validation_r2": explained_share(totals)}


def objective_of(preprocessing: Preprocessing) -> Objective:
    """The objective of a network that was fitted like this."""
    return Regression(preprocessing.labels) if preprocessing.labels else Classification()
