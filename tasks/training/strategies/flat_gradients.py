"""All gradients of a rank as views of one tensor, and how it is summed over the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from tasks.kernel.errors import TrainingError
from tasks.training.strategies.base import Exchange, State


class FlatGradients:
    """Gradients of all parameters as views of one tensor, so that one exchange a step is enough.

    Args:
        parameters: of one type and on one device.

    Raises:
        TrainingError: there is nothing to train.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        trained = [(name, p) for name, p in parameters if p.requires_grad]
        if not trained:
            raise TrainingError(
                "the network has no parameter to train; expected one that asks for a gradient"
            )
        first = trained[0][1]
        self.flat = torch.zeros(
            sum(p.numel() for _, p in trained), device=first.device, dtype=first.dtype
        )
        self.views: dict[str, Tensor] = {}
        start = 0
        for name, parameter in trained:
            end = start + parameter.numel()
            self.views[name] = parameter.grad = self.flat[start:end].view_as(parameter)
            start = end

    def clear(self) -> None:
        """Set all gradients to zero."""
        self.flat.zero_()


class GradientSum(Protocol):
    """Replaces a rank's gradients by their sum over all ranks, exactly or nearly."""

    def sum_(self, gradients: FlatGradients) -> int:
        """Sum over the ranks in place; collective. Returns the bytes that this rank sent."""

    def state(self) -> State:
        """What a checkpoint keeps, such as what was left out so far; collective."""

    def load(self, state: State) -> None:
        """Take over what `state` gave, on any world size."""


class ExactSum:
    """The fp32 sum, in one exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def sum_(self, gradients: FlatGradients) -> int:
        """Sum over the ranks in place."""
        self._exchange.sum_(gradients.flat)
        return ring_bytes(gradients.flat.nbytes, self._exchange.size)

    def state(self) -> State:
        """Nothing is left out, so there is nothing to keep."""
        return {}

    def load(self, state: State) -> None:
        """Nothing to take over."""


def ring_bytes(num_bytes: int, size: int) -> int:
    """Bytes that each of `size` ranks sends in a ring allreduce of a buffer of `num_bytes`."""
    return 2 * num_bytes * (size - 1) // size
