"""Mixed precision: what is computed in 16 bits, and the scale that keeps fp16 gradients in range.

After Micikevicius et al., "Mixed Precision Training" (2017). Weights, the sums over ranks and the
optimizer stay in fp32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from tasks.training.strategies.base import State
from tasks.training.strategies.config import Precision

SIXTEEN_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which the network runs: products in 16 bits where `precision` says so."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=SIXTEEN_BITS[precision])


@dataclass
class LossScale:
    """The factor of the loss that keeps small fp16 gradients from becoming zero.

    The rule of `torch.amp.GradScaler`, but judged on the gradient of all ranks, so that all of them
    skip the same steps: halved when a gradient overflows, doubled after many that did not.
    """

    factor: float
    growth_steps: int = 2000
    max_factor: float = 2.0**24
    clean_steps: int = 0
    num_skipped: int = 0

    @classmethod
    def of(cls, precision: Precision) -> LossScale:
        """Only fp16 needs one; otherwise it is 1 and stays so."""
        return cls(2.0**16) if precision == "fp16" else cls(1.0, max_factor=1.0)

    @property
    def can_fall(self) -> bool:
        """False where an overflow has another reason than the scale."""
        return self.factor > 1.0

    def after_overflow(self) -> None:
        """The step is skipped; try the next one with half the scale."""
        self.factor /= 2
        self.clean_steps = 0
        self.num_skipped += 1

    def after_step(self) -> None:
        """The gradient was in range."""
        self.clean_steps += 1
        if self.clean_steps >= self.growth_steps:
            self.factor = min(2 * self.factor, self.max_factor)
            self.clean_steps = 0

    def state(self) -> State:
        """What a checkpoint keeps."""
        return {
            "loss_scale": self.factor,
            "clean_steps": self.clean_steps,
            "skipped_steps": self.num_skipped,
        }

    def load(self, state: State) -> None:
        """Take over a checkpoint's scale; one that was written without any leaves this as it is."""
        self.num_skipped = int(state.get("skipped_steps", self.num_skipped))
        if self.max_factor > 1.0 and state.get("loss_scale", 1.0) > 1.0:
            self.factor = float(state["loss_scale"])
            self.clean_steps = int(state["clean_steps"])
