"""Steps of an epoch, the learning rate of a step, the optimizer, the mean of weights.

Nothing here is shared by ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tasks.training.config import TrainingConfig

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
