"""Weights, gradients and optimizer state cut over the ranks: torch's fully sharded data parallel.

After Rajbhandari et al., "ZeRO" (2020). Each block's weights are whole on a rank only while the
block computes, so a network may be larger than one device's memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tasks.kernel.errors import ConfigurationError
from tasks.training.checkpoints.state import TensorRows
from tasks.training.strategies.base import State
from tasks.training.strategies.data_parallel import DataParallel, blocks_of
from tasks.training.strategies.optimizer import ring_bytes


class _Root(nn.Module):
    """What is cut at the top: FSDP warns of a network that returns a view, and most do."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Tensor:
        outputs: Tensor = self.network(*inputs)
        return outputs.clone()


class FsdpStrategy(DataParallel):
    """Every backward and evaluation is a collective: ranks without rows take part with none.

    With `fsdp_replicas` above 1, ranks form as many groups that each hold the whole network in
    shards: weights travel inside a group alone (one host), and only gradients between groups.
    `state` and `load` take whole tensors, so a rank's host memory must hold the network once;
    into a checkpoint each rank writes the rows that it holds.
    """

    name: ClassVar[str] = "fsdp"
    is_cut: ClassVar[bool] = True
    _empty_parts_count: ClassVar[bool] = True

    def _prepare(self) -> None:
        mesh = self._mesh()
        for module in [*blocks_of(self.network), _Root(self.network)]:
            self._root = fully_shard(module, mesh=mesh)
            # Gradients are sums over ranks, and Gloo knows no other reduction.
            self._root.set_gradient_divide_factor(1.0)
            self._root.set_force_sum_reduction_for_comms(True)
        self._parts = {n: cast(DTensor, p) for n, p in self.network.named_parameters()}
        self._num_bytes = sum(p.numel() * p.element_size() for p in self._parts.values())

    def _mesh(self) -> DeviceMesh:
        replicas, size = self.config.fsdp_replicas, self.ranks.size
        if size % replicas:
            raise ConfigurationError(
                f"fsdp_replicas={replicas} does not divide over {size} ranks; use a divisor"
            )
        shape = (size,) if replicas == 1 else (replicas, size // replicas)
        names = ("replicate", "shard")[-len(shape) :]
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def _forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        outputs: Tensor = cast(nn.Module, self._root)(*inputs)
        return outputs

    def _evaluated(self, inputs: tuple[Tensor, ...]) -> Tensor:
        outputs = self._forward(inputs)
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
        shards = self.ranks.size // self.config.fsdp_replicas
        passes = 2 * self.config.accumulation_steps + 1
        replicas = self.config.fsdp_replicas
        self.wire_bytes += passes * self._num_bytes * (shards - 1) // shards
        self.wire_bytes += ring_bytes(self._num_bytes // shards, replicas)

    def _gradients(self) -> list[Tensor]:
        gradients = (cast(DTensor | None, p.grad) for p in self._parts.values())
        return [gradient.to_local() for gradient in gradients if gradient is not None]

    def _clear_gradients(self) -> None:
        for parameter in self._parts.values():
            parameter.grad = None

    def _norm(self) -> float:
        shard = torch.nn.utils.get_total_norm(self._gradients()).double().item()
        squares = self.ranks.sum(np.array([shard**2]))
        return float(np.sqrt(squares[0] / self.config.fsdp_replicas))

    def _to_plain(self, name: str, part: Tensor) -> Tensor:
        return part.full_tensor() if isinstance(part, DTensor) else part

    def own_state(self) -> State:
        """See `Strategy.own_state`; of several replicas the first one's ranks have the rows."""
        return self._described(self._own_rows)

    def _own_rows(self, name: str, part: Tensor) -> Tensor | TensorRows:
        if not isinstance(part, DTensor):
            return part
        _, offset = compute_local_shape_and_global_offset(
            part.shape, part.device_mesh, part.placements
        )
        local = part.to_local()
        in_first_replica = part.device_mesh.get_local_rank(0) == 0
        if self.config.fsdp_replicas > 1 and not in_first_replica:
            local = local[:0]
        return TensorRows(local, offset[0], part.shape[0])

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
        summed = self.ranks.sum(torch.stack(local).cpu().numpy())
        return [float(value) / self.config.fsdp_replicas for value in summed]
