"""Ranks that step alone and average their weights every so many steps.

After Stich, "Local SGD Converges Fast and Communicates Little" (2018).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from tasks.kernel.errors import TrainingError
from tasks.training.strategies.base import Batch, State
from tasks.training.strategies.flat_gradients import ring_bytes
from tasks.training.strategies.horovod import HorovodStrategy


class FlatWeights:
    """The parameters of a network as views of one tensor, so that one exchange averages them."""

    def __init__(self, network: nn.Module) -> None:
        parameters = [p for p in network.parameters() if p.requires_grad]
        self.flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        parts = torch.split(self.flat, [p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part.view_as(parameter)


class LocalSgd(HorovodStrategy):
    """Each rank steps on its own rows; every `local_steps` steps all take the mean of the weights.

    A rank's gradient is its share of the global one times the number of ranks: the gradient of its
    own rows where all ranks have equally many. With plain SGD and one local step this is
    synchronous training.

    Each rank keeps its own optimizer state, such as Adam's moments, through the averaging. Before
    anything is evaluated or kept in a checkpoint the weights are averaged too, before a checkpoint
    also the optimizer state, and training goes on from there: a run that was cut off goes on as if
    it had not been. Bytes are those of synchronous training over `local_steps`.
    """

    name: ClassVar[str] = "local-sgd"

    def _prepare(self) -> None:
        super()._prepare()
        self.weights = FlatWeights(self.network)
        self._num_steps_alone = 0
        self._weights_differ = False
        self._moments_differ = False

    def _sum_gradients(self) -> None:
        self.gradients.flat.mul_(self.exchange.size)

    def _step(self, norm: float, learning_rate: float) -> None:
        super()._step(norm, learning_rate)
        self._weights_differ = self._moments_differ = True
        self._num_steps_alone += 1
        if self._num_steps_alone == self.config.local_steps:
            with self.phase("exchange"):
                self._end_round()
            self._num_steps_alone = 0

    def _end_round(self) -> None:
        self._average_(self.weights.flat)
        self._weights_differ = False

    def _average_(self, tensor: Tensor) -> None:
        self.exchange.sum_(tensor)
        tensor.div_(self.exchange.size)
        self.wire_bytes += ring_bytes(tensor.nbytes, self.exchange.size)

    def _meet(self) -> None:
        """Give all ranks equal weights now, where they have stepped since the last time."""
        if self._weights_differ:
            self._average_(self.weights.flat)
            self._weights_differ = False
            self._num_steps_alone = 0

    def _name_the_source(self, batch: Batch, global_rows: int, draws: Tensor) -> None:
        # The others know nothing of this rank's gradient and wait for nothing: so it speaks alone.
        raise TrainingError(
            f"rank {self.exchange.rank}: the gradient of its own {batch.num_rows} rows is NaN or "
            "infinite; expected finite numbers. Its weights were not changed. Look for NaN or "
            "extreme values in these rows, or lower the learning rate"
        )

    def evaluate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """See `Strategy.evaluate`."""
        self._meet()
        return super().evaluate(inputs)

    def state(self) -> State:
        """See `Strategy.state`."""
        self._meet()
        if self._moments_differ:
            for moment in self._optimizer.tensors():
                self._average_(moment)
            self._moments_differ = False
        return super().state()

    def load(self, state: State) -> None:
        """See `Strategy.load`."""
        super().load(state)
        self._num_steps_alone = 0
        self._weights_differ = self._moments_differ = False

    def checksum(self) -> list[float]:
        """See `Strategy.checksum`."""
        self._meet()
        return super().checksum()
