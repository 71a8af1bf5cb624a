"""A whole replica on each rank, exchanged by torch's DistributedDataParallel during backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tasks.training.strategies.data_parallel import DataParallel
from tasks.training.strategies.flat_gradients import ring_bytes
from tasks.training.strategies.torch_communicator import TorchExchange


class DdpStrategy(DataParallel):
    """Gradients travel in buckets while the backward pass goes on.

    A network some of whose parameters have no part in the loss is refused by torch at the second
    step; the Horovod strategy takes it.
    """

    name: ClassVar[str] = "ddp"
    _empty_parts_count: ClassVar[bool] = True

    def _prepare(self) -> None:
        exchange = cast(TorchExchange, self.exchange)
        self._wrapped = DistributedDataParallel(
            torch.compile(self.network) if self.config.compile else self.network,
            process_group=exchange.process_group,
            forward_sync_buffers=False,
            init_sync=False,  # `DataParallel` has given all ranks rank 0's parameters
            gradient_as_bucket_view=True,
        )
        self._num_bytes = sum(
            p.numel() * p.element_size() for p in self.network.parameters() if p.requires_grad
        )

    def _forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        outputs: Tensor = self._wrapped(*inputs)
        return outputs

    def _exchanging(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self._wrapped.no_sync()

    def _loss_factor(self, global_rows: int) -> float:
        # DDP divides by the number of ranks what it sums. In fp16 the loss has no room for that
        # number, and the gradients are to be multiplied in any case.
        before = 1 if self.config.precision == "fp16" else self.exchange.size
        return super()._loss_factor(global_rows) * before

    def _gradient_factor(self) -> float:
        after = self.exchange.size if self.config.precision == "fp16" else 1
        return super()._gradient_factor() * after

    def _sum_gradients(self) -> None:
        self.wire_bytes += ring_bytes(self._num_bytes, self.exchange.size)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.network.parameters() if p.grad is not None]
