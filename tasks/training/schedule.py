"""Steps of an epoch, the learning rate of a step, and the optimizer: nothing that ranks share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

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
