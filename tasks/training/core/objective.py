"""What a network is trained for: the loss of a row, and the quality by which epochs are compared.

Quality is made of totals over rows, which ranks simply add up.

Where there is a teacher, the loss of a training row is a mean of two: that of its label, and that
of the teacher's output (Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network",
2015). Validation knows the labels alone, so its curves compare with those of any other training.

And how it steps: the steps of an epoch, their learning rate, the optimizer, the mean of weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tasks.contracts.training import DistillationTargets
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.training.config import TrainingConfig
from tasks.training.data.preprocess import Float64Array, LabelScale
from tasks.training.strategies.base import RowLosses

# Two rows in one bin count as a tie: at worst the AUC is off by half the share of such pairs.
NUM_SCORE_BINS = 1 << 16
# Of each of several classes; ranks exchange them all.
NUM_CLASS_BINS = 1 << 13


def score_histograms(
    scores: NDArray[np.float32], labels: NDArray[Any], num_bins: int = NUM_SCORE_BINS
) -> Float64Array:
    """Rows by score, shape (2, num_bins): first those with label 0, then those with 1.

    Args:
        scores: probabilities, shape (rows,).
        labels: 0 or 1, shape (rows,).
        num_bins: equally wide ones.
    """
    bins = np.minimum((scores.astype(np.float64) * num_bins).astype(int), num_bins - 1)
    counts = [np.bincount(bins[labels == label], minlength=num_bins) for label in (0, 1)]
    return np.array(counts, dtype=np.float64)


def histogram_auc(histograms: Float64Array) -> float:
    """Probability that a row with label 1 scores above one with label 0; a tie counts half.

    Args:
        histograms: from `score_histograms`, summed over ranks; both labels must occur.
    """
    negatives, positives = histograms
    below = np.cumsum(negatives) - negatives
    pairs = negatives.sum() * positives.sum()
    return float((positives * (below + negatives / 2)).sum() / pairs)


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

    def standardised(self, labels: Tensor) -> Tensor:
        """Labels as the outputs are meant: 0 and 1 as they are."""
        return labels

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
        # What is no number shows in the loss.
        return score_histograms(torch.sigmoid(outputs).nan_to_num().numpy(), labels.numpy()).ravel()

    def quality(self, totals: Float64Array) -> dict[str, float]:
        """AUC."""
        return {"validation_auc": histogram_auc(totals.reshape(2, -1))}


class MultiClass(Objective):
    """Outputs are a logit for each class: cross-entropy, judged by the mean AUC of the classes."""

    def __init__(self, num_classes: int) -> None:
        self.num_totals = num_classes * 2 * NUM_CLASS_BINS
        self._num_classes = num_classes
        self.row_losses = self._cross_entropy

    def _cross_entropy(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, labels.long(), reduction="none")

    def teacher_losses(self, outputs: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """None: a column of the rows holds one output of a teacher."""
        raise ConfigurationError(
            f"a network of {self._num_classes} classes cannot learn from a teacher, whose outputs "
            "are one a row; train it from labels. Nothing was trained"
        )

    def totals(self, outputs: Tensor, labels: Tensor) -> Float64Array:
        """Two histograms of scores for each class: of the other rows, and of its own."""
        scores = torch.softmax(outputs, dim=1).nan_to_num().numpy()
        histograms = [
            score_histograms(scores[:, k], labels.numpy() == k, NUM_CLASS_BINS)
            for k in range(self._num_classes)
        ]
        return np.concatenate(histograms, axis=None)

    def quality(self, totals: Float64Array) -> dict[str, float]:
        """Mean of the AUCs of each class against the rest.

        Raises:
            DataContractError: a class does not occur.
        """
        each = totals.reshape(self._num_classes, 2, -1)
        if absent := np.flatnonzero(each[:, 1].sum(axis=1) == 0).tolist():
            raise DataContractError(
                f"no validation row is of class(es) number {absent}; expected some of each of the "
                f"{self._num_classes}. Widen splits.validation, or take out of the training set's "
                "`classes` what does not occur"
            )
        return {"validation_auc": float(np.mean([histogram_auc(of_class) for of_class in each]))}


class Regression(Objective):
    """Outputs are standardised predictions: Huber loss, judged by R2."""

    num_totals = 4

    def __init__(self, scale: LabelScale) -> None:
        self._scale = scale
        self.row_losses = self._huber

    def standardised(self, labels: Tensor) -> Tensor:
        """Labels in standard deviations from their mean."""
        return (labels - self._scale.mean) / self._scale.deviation

    def _huber(self, outputs: Tensor, labels: Tensor) -> Tensor:
        targets = self.standardised(labels)
        return functional.huber_loss(outputs, targets, reduction="none", delta=HUBER_DELTA)

    def teacher_losses(self, outputs: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Huber loss against the teacher's prediction; there is nothing to soften."""
        return self._huber(outputs, targets)

    def totals(self, outputs: Tensor, labels: Tensor) -> Float64Array:
        """Squared errors, labels, squared labels (standardised, for precision) and rows."""
        known = ((labels.double() - self._scale.mean) / self._scale.deviation).numpy()
        errors = outputs.double().nan_to_num().numpy() - known
        return np.array([errors @ errors, known.sum(), known @ known, len(known)], dtype=float)

    def quality(self, totals: Float64Array) -> dict[str, float]:
        """R2: 1 minus the squared errors over those of the labels' mean; the labels must differ."""
        errors, labels, squares, num_rows = totals
        return {"validation_r2": float(1 - errors / (squares - labels**2 / num_rows))}


def labels_of(targets: Tensor) -> Tensor:
    """The labels among what a batch has to learn, shape (rows,); a teacher's outputs are left."""
    return targets if targets.ndim == 1 else targets[:, -1]


def objective_of(num_outputs: int, labels: LabelScale | None) -> Objective:
    """The objective of a model with so many outputs, and with labels that are numbers or none."""
    if num_outputs > 1:
        return MultiClass(num_outputs)
    return Regression(labels) if labels else Classification()


MIN_STEPS_PER_EPOCH = 8
WARM_UP_SHARE = 0.2
START_RATE_SHARE = 0.04


@dataclass(frozen=True)
class StepPlan:
    """Steps of an epoch: the same on all ranks and for any number of ranks."""

    rows_per_shard: int
    num_steps: int

    @classmethod
    def of(cls, smallest_shard: int, config: TrainingConfig) -> StepPlan:
        """Plan epochs for shards of at least `smallest_shard` rows.

        A batch takes `global_batch_size` rows, or fewer where that would make less than
        `MIN_STEPS_PER_EPOCH` steps.
        """
        rows = config.global_batch_size // config.num_shards
        rows = min(rows, max(1, smallest_shard // MIN_STEPS_PER_EPOCH))
        return cls(rows_per_shard=rows, num_steps=smallest_shard // rows)


def one_cycle_rate(step: int, num_steps: int, peak: float) -> float:
    """Learning rate of a step: linear warm-up to the peak, then half a cosine down to 0.

    After Smith and Topin, "Super-Convergence" (2017). A function of the step alone, so there is no
    scheduler state to keep.
    """
    warm_up = WARM_UP_SHARE * num_steps
    if step < warm_up:
        return peak * (START_RATE_SHARE + (1 - START_RATE_SHARE) * step / warm_up)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (num_steps - warm_up)))


def adamw(
    parameters: Iterable[tuple[str, nn.Parameter]], config: TrainingConfig
) -> torch.optim.Optimizer:
    """AdamW; only weight matrices decay, biases do not."""
    named = [parameter for _, parameter in parameters]
    groups = (
        {"params": [p for p in named if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in named if p.ndim <= 1], "weight_decay": 0.0},
    )
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.learning_rate, fused=True
    )


def averaged(
    earlier: Mapping[str, Tensor], newest: Mapping[str, Tensor], num_epochs: int, decay: float
) -> dict[str, Tensor]:
    """Mean of the weights at the ends of epochs; each epoch counts `decay` times the next one.

    After Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization"
    (2018). From epoch to epoch weights wander, and the last digit of a sum decides whereto; their
    mean wanders less, so it matters less which epoch is the best.

    Args:
        earlier: the mean after the epoch before; empty after the first.
        newest: the weights after this epoch.
        num_epochs: epochs that have ended.
        decay: at least 0, below 1; with 0 the mean is the newest.
    """
    if num_epochs == 1:
        return dict(newest)
    share = (1 - decay) / (1 - decay**num_epochs)
    return {name: _between(earlier[name], value, share) for name, value in newest.items()}


def _between(earlier: Tensor, newest: Tensor, share: float) -> Tensor:
    # What is not trained is the same in both, and may be infinite or a count.
    if not newest.is_floating_point() or torch.equal(earlier, newest):
        return newest
    return torch.lerp(earlier, newest, share)
