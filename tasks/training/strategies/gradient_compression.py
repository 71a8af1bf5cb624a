"""Gradients that travel in fewer bytes: in half precision, and what lossy ways have in common.

Works on any `Exchange`, on one flat buffer of all gradients. Gradients are summed, never averaged,
so what a lossy way has left out on one rank can be paid back by any other: see `ErrorFeedback`.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import cast

import numpy as np
import torch
from torch import Tensor

from tasks.training.strategies.base import Exchange, State
from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.flat_gradients import FlatGradients, ring_bytes

LOGGER = logging.getLogger(__name__)
# Half of float16's largest number: scaling to it by a power of two never overflows.
HALF_PRECISION_TOP = 32768.0
# Where a checkpoint keeps what the ranks have left out.
RESIDUAL = "gradient_residual"


class HalfPrecisionSum:
    """The sum in float16, at half the bytes; each value keeps 11 significant bits.

    All ranks scale by one power of two, chosen so that no partial sum can overflow: no sum is
    larger than the sum of the ranks' largest values. What is 2**-39 of that, or less, vanishes.
    """

    def __init__(self, config: StrategyConfig, exchange: Exchange) -> None:
        self._exchange = exchange

    def sum_(self, gradients: FlatGradients) -> int:
        """Sum over the ranks in place; returns the bytes that this rank sent.

        A value that is no number on one rank becomes no numbers everywhere, on all ranks.
        """
        flat = gradients.flat
        bound = float(self._exchange.sum(np.array([float(flat.abs().max())]))[0])
        sent = ring_bytes(8, self._exchange.size)
        if bound == 0.0:
            return sent
        if not math.isfinite(bound):
            flat.fill_(math.nan)
            return sent
        exponent = math.floor(math.log2(HALF_PRECISION_TOP / bound))
        # In two factors: one alone may leave the range of float32 where gradients are tiny.
        half = exponent // 2
        scaled = (flat * 2.0**half * 2.0 ** (exponent - half)).half()
        self._exchange.sum_(scaled)
        flat.copy_(scaled)
        flat.mul_(2.0**-half).mul_(2.0 ** (half - exponent))
        return sent + ring_bytes(scaled.nbytes, self._exchange.size)

    def state(self) -> State:
        """Nothing is left out, so there is nothing to keep."""
        return {}

    def load(self, state: State) -> None:
        """Nothing to take over."""
        if RESIDUAL in state:
            LOGGER.warning(
                "the checkpoint holds gradients that a lossy compression had left out; they are "
                "dropped, since fp16 pays nothing back"
            )


class ErrorFeedback(ABC):
    """A lossy sum that pays back in later steps what it left out.

    After Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory" (2018), and Karimireddy et al.,
    "Error Feedback Fixes SignSGD" (2019): each rank adds what it left out to its next gradients.

    A checkpoint holds the sum over the ranks of what they left out. When it is loaded, each rank
    takes an equal share, so on another number of ranks nothing is lost either.
    """

    def __init__(self, config: StrategyConfig, exchange: Exchange) -> None:
        self._config = config
        self._exchange = exchange
        self._left_out: dict[str, Tensor] = {}

    def sum_(self, gradients: FlatGradients) -> int:
        """Sum over the ranks in place, nearly; returns the bytes that this rank sent.

        A value that is no number on one rank becomes no numbers everywhere, on all ranks; what was
        left out earlier is then kept.
        """
        for name, left_out in self._left_out.items():
            gradients.views[name].add_(left_out.to(gradients.flat.device))
        total, sent, num_bytes = self._compressed_sum(gradients)
        # The total is equal on all ranks, hence the choice too.
        if bool(torch.isfinite(total).all()):
            residual = gradients.flat - sent
            self._left_out = views_of(residual, gradients)
            gradients.flat.copy_(total)
        else:
            gradients.flat.fill_(math.nan)
        return num_bytes

    @abstractmethod
    def _compressed_sum(self, owed: FlatGradients) -> tuple[Tensor, Tensor, int]:
        """What all ranks sent of what they owe, summed; what this one sent; and its bytes.

        Changes neither `owed` nor, where the sum is no number, anything that a later call needs.
        """

    def state(self) -> State:
        """What the ranks have left out so far, by parameter, summed over them; collective."""
        summed = {name: left_out.clone() for name, left_out in self._left_out.items()}
        for tensor in summed.values():
            self._exchange.sum_(tensor)
        return {RESIDUAL: {name: tensor.cpu() for name, tensor in summed.items()}}

    def load(self, state: State) -> None:
        """Take over what `state` gave, of any lossy way and on any number of ranks."""
        left_out = cast(dict[str, Tensor], state.get(RESIDUAL, {}))
        self._left_out = {name: value / self._exchange.size for name, value in left_out.items()}

    def _sum_together(self, tensors: Iterable[Tensor]) -> tuple[list[Tensor], int]:
        """Sums over all ranks in one exchange, and the bytes that this rank sent."""
        shapes = [tensor.shape for tensor in tensors]
        if not shapes:
            return [], 0
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._exchange.sum_(flat)
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        summed = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return summed, ring_bytes(flat.nbytes, self._exchange.size)


def views_of(flat: Tensor, like: FlatGradients) -> dict[str, Tensor]:
    """Parts of `flat` by name and in shape, as in the buffer of `like`."""
    parts = torch.split(flat, [view.numel() for view in like.views.values()])
    return {
        name: part.view_as(view)
        for (name, view), part in zip(like.views.items(), parts, strict=True)
    }
