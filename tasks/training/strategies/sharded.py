"""Weights, gradients and optimizer state cut over the ranks: torch's fully sharded data parallel.

After Rajbhandari et al., "ZeRO" (2020). Each block's weights are whole on a rank only while the
block computes, so a network may be larger than one device's memory.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tasks.training.strategies.data_parallel import Strategy


class _Root(nn.Module):
    """What is cut at the top: FSDP warns of a network that returns a view, and most do."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Tensor:
        outputs: Tensor = self.network(*inputs)
        return outputs.clone()


class FsdpStrategy(Strategy):
    """Every backward and evaluation is a collective: ranks without rows take part with none.

    `state` and `load` take whole tensors, so a rank's host memory must hold the network once.
    """

    _empty_batches_count: ClassVar[bool] = True

    def _prepare(self) -> None:
        mesh = init_device_mesh(self.device.type, (self.ranks.size,))
        for module in [*_blocks_of(self.network), _Root(self.network)]:
            self._root = fully_shard(module, mesh=mesh)
            # Gradients are sums over ranks, and Gloo knows no other reduction.
            self._root.set_gradient_divide_factor(1.0)
            self._root.set_force_sum_reduction_for_comms(True)
        self._trained = cast(nn.Module, self._root)
        self._parts = {n: cast(DTensor, p) for n, p in self.network.named_parameters()}
        self._num_bytes = sum(p.numel() * p.element_size() for p in self._parts.values())

    def _evaluated(self, inputs: tuple[Tensor, ...]) -> Tensor:
        outputs: Tensor = self._trained(*inputs)
        self._root.reshard()
        return outputs

    def _exchanging(self, last: bool) -> AbstractContextManager[object]:
        self._root.set_requires_gradient_sync(last)
        return nullcontext()

    def _sum_gradients(self) -> None:
        """Backward has summed them; count what travelled, at most.

        A ring gathers the weights for the forward and again for the backward pass of each part of
        the batch, and scatters the sums of the gradients once.
        """
        passes = 2 * self.config.accumulation_steps + 1
        self.wire_bytes += passes * self._num_bytes * (self.ranks.size - 1) // self.ranks.size

    def _gradients(self) -> list[Tensor]:
        gradients = (cast(DTensor | None, p.grad) for p in self._parts.values())
        return [gradient.to_local() for gradient in gradients if gradient is not None]

    def _clear_gradients(self) -> None:
        for parameter in self._parts.values():
            parameter.grad = None

    def _norm(self) -> float:
        shard = torch.nn.utils.get_total_norm(self._gradients()).double().item()
        return float(np.sqrt(self.ranks.sum(np.array([shard**2]))[0]))

    def _to_plain(self, name: str, part: Tensor) -> Tensor:
        return part.full_tensor() if isinstance(part, DTensor) else part

    def _from_plain(self, name: str, whole: Tensor) -> Tensor:
        held = self._parts.get(name)
        if held is None:  # a buffer
            return whole
        # Every rank has read the whole tensor, so nothing needs to travel.
        return distribute_tensor(
            whole.to(self.device), held.device_mesh, held.placements, src_data_rank=None
        )

    @torch.no_grad()
    def checksum(self) -> list[float]:
        """See `Strategy.checksum`."""
        local = [p.to_local().sum(dtype=torch.float64) for p in self._parts.values()]
        summed: list[float] = self.ranks.sum(torch.stack(local).cpu().numpy()).tolist()
        return summed


def _blocks_of(network: nn.Module) -> list[nn.Module]:
    """The direct parts with parameters; not containers, whose owner does the computing."""
    return [
        child
        for child in network.children()
        if type(child).forward is not nn.Module.forward
        and next(child.parameters(), None) is not None
    ]
