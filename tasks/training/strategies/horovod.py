"""The default: a whole replica on each rank, gradients in one flat buffer, summed by Horovod."""

from __future__ import annotations

import importlib
from typing import ClassVar

import torch
from torch import Tensor

from tasks.training.strategies.base import State
from tasks.training.strategies.data_parallel import DataParallel
from tasks.training.strategies.flat_gradients import ExactSum, FlatGradients, GradientSum

# Where each way to sum gradients with fewer bytes is; built with (config, exchange).
COMPRESSIONS = {
    "fp16": "tasks.training.strategies.gradient_compression:HalfPrecisionSum",
    "powersgd": "tasks.training.strategies.power_sgd:PowerSgdSum",
    "topk": "tasks.training.strategies.top_k:TopKSum",
}


class HorovodStrategy(DataParallel):
    """Whole replicas; works over any exchange, and gives compression and elastic jobs their hold.

    Nothing is wrapped: the optimizer is a plain one, and the network stays as it is.
    """

    name: ClassVar[str] = "horovod"

    def _prepare(self) -> None:
        self.gradients = FlatGradients(self.network.named_parameters())
        self._sum = self._gradient_sum()
        self._trained = torch.compile(self.network) if self.config.compile else self.network

    def _gradient_sum(self) -> GradientSum:
        if self.config.gradient_compression == "none":
            return ExactSum(self.exchange)
        module, _, name = COMPRESSIONS[self.config.gradient_compression].partition(":")
        kind = getattr(importlib.import_module(module), name)
        compressed: GradientSum = kind(self.config, self.exchange)
        return compressed

    def _forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        outputs: Tensor = self._trained(*inputs)
        return outputs

    def _sum_gradients(self) -> None:
        self.wire_bytes += self._sum.sum_(self.gradients)

    def _gradients(self) -> list[Tensor]:
        return [self.gradients.flat]

    def state(self) -> State:
        """See `Strategy.state`."""
        state = super().state()
        state["strategy"].update(self._sum.state())
        return state

    def load(self, state: State) -> None:
        """See `Strategy.load`."""
        super().load(state)
        self._sum.load(state.get("strategy", {}))
