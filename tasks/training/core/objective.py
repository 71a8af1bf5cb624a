"""What a network is trained for: the loss of a row, and the quality by which epochs are compared.

Quality is made of totals over rows, which ranks simply add up.

Where there is a teacher, the loss of a training row is a mean of two: that of its label, and that
of the teacher's output (Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network",
2015). Validation knows the labels alone, so its curves compare with those of any other training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tasks.contracts.training import DistillationTargets
from tasks.training.data.preprocess import LabelScale, Preprocessing
from tasks.training.strategies.base import RowLosses

# Two rows in one bin count as a tie: at worst the AUC is off by half the share of such pairs.
NUM_SCORE_BINS = 1 << 16


def score_histograms(
    scores: NDArray[np.float32], labels: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Rows by score, shape (2, NUM_SCORE_BINS): first those with label 0, then those with 1.

    Args:
        scores: probabilities, shape (rows,).
        labels: 0 or 1, shape (rows,).
    """
    bins = np.minimum((scores.astype(np.float64) * NUM_SCORE_BINS).astype(int), NUM_SCORE_BINS - 1)
    return np.stack(
        [
            np.bincount(bins[labels == label], minlength=NUM_SCORE_BINS).astype(np.float64)
            for label in (0, 1)
        ]
    )


def histogram_auc(histograms: NDArray[np.float64]) -> float:
    """Probability that a row with label 1 scores above one with label 0; a tie counts half.

    Args:
        histograms: from `score_histograms`, summed over ranks; both labels must occur.
    """
    negatives, positives = histograms
    below = np.cumsum(negatives) - negatives
    pairs = negatives.sum() * positives.sum()
    return float((positives * (below + negatives / 2)).sum() / pairs)


def squared_sums(
    predictions: NDArray[np.float64], labels: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Totals of `explained_share`: squared errors, labels, squared labels, rows; shape (4,).

    Args:
        predictions: shape (rows,).
        labels: shape (rows,); about standardised, or the squares lose precision.
    """
    errors = predictions - labels
    return np.array([errors @ errors, labels.sum(), labels @ labels, len(labels)], dtype=float)


def explained_share(totals: NDArray[np.float64]) -> float:
    """R2: 1 minus the squared errors over those of the labels' mean; the labels must differ.

    Args:
        totals: from `squared_sums`, summed over ranks.
    """
    errors, labels, squares, num_rows = totals
    return float(1 - errors / (squares - labels**2 / num_rows))


Float64Array = NDArray[np.float64]
HUBER_DELTA = 1.0
"""Standard deviations of the label beyond which an error counts by its size, not its square."""


class Objective(ABC):
    """Loss and quality of one kind of task."""

    num_totals: int
    row_losses: RowLosses

    @abstractmethod
    def teacher_losses(self, outputs: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Loss of each row against a teacher's outputs, shape (rows,).

        Args:
            outputs: of the network, shape (rows,).
            targets: of the teacher, shape (rows,): logits, or predictions in the label's unit.
            temperature: softens the probabilities of a classification.
        """

    def training_losses(self, distillation: DistillationTargets | None) -> RowLosses:
        """What is minimised: the labels' losses, mixed with a teacher's where there is one.

        With a teacher, targets are (teacher output, label), shape (rows, 2).
        """
        if distillation is None:
            return self.row_losses
        weight, temperature = distillation.weight, distillation.temperature

        def losses(outputs: Tensor, targets: Tensor) -> Tensor:
            labels = targets[:, 1]
            learnt = self.teacher_losses(outputs, targets[:, 0], temperature)
            return (1 - weight) * self.row_losses(outputs, labels) + weight * learnt

        return losses

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

    def teacher_losses(self, outputs: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Cross-entropy of softened probabilities.

        Times the temperature's square, since its gradients shrink by that (Hinton et al., 2).
        """
        soft = torch.sigmoid(targets / temperature)
        losses: Tensor = self.row_losses(outputs / temperature, soft)
        return temperature**2 * losses

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

    def teacher_losses(self, outputs: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Huber loss against the teacher's prediction; there is nothing to soften."""
        return self._huber(outputs, targets)

    def totals(self, outputs: Tensor, labels: Tensor) -> Float64Array:
        """Squared errors, labels, squared labels (standardised) and rows."""
        standardised = (labels.double() - self._scale.mean) / self._scale.deviation
        return squared_sums(outputs.double().nan_to_num().numpy(), standardised.numpy())

    def quality(self, totals: Float64Array) -> dict[str, float]:
        """R2."""
        return {"validation_r2": explained_share(totals)}


def labels_of(targets: Tensor) -> Tensor:
    """The labels among what a batch has to learn, shape (rows,); a teacher's outputs are left."""
    return targets if targets.ndim == 1 else targets[:, -1]


def objective_of(preprocessing: Preprocessing) -> Objective:
    """The objective of a network that was fitted like this."""
    return Regression(preprocessing.labels) if preprocessing.labels else Classification()
