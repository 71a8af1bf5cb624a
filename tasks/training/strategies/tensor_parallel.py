"""A network cut layer by layer over ranks that share a replica.

Combined with replicas, each of which reads rows of its own. The whole network is built on the CPU
of each rank; only a rank's own part goes to its device. State dicts are whole and plain, with the
names of the uncut network.

After Shoeybi et al., "Megatron-LM" (2019): a linear layer whose outputs are cut is followed by one
whose inputs are, so that two layers need one collective in each direction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from tasks.kernel.errors import ConfigurationError
from tasks.training.strategies.base import Batch, Cut
from tasks.training.strategies.data_parallel import Strategy
from tasks.training.strategies.optimizer import FlatGradients, ring_bytes


class CutDropout(nn.Module):
    """Dropout on one part of a layer's units: drops what dropout on all of them would drop.

    Every rank draws for all units and uses its own; generators must be equal on all parts.
    """

    def __init__(self, share: float, part: int, num_parts: int) -> None:
        super().__init__()
        self.share = share
        self._part = part
        self._num_parts = num_parts

    def forward(self, units: Tensor) -> Tensor:
        """Drop some of this rank's units, the last dimension."""
        if not self.training or self.share == 0:
            return units
        width = units.shape[-1]
        factors = units.new_empty(*units.shape[:-1], width * self._num_parts)
        factors.bernoulli_(1 - self.share).div_(1 - self.share)
        return units * factors.narrow(-1, self._part * width, width)


class TensorParallel(Strategy):
    """Each rank holds its part of the cut layers, of their gradients and of the optimizer state.

    Ranks are a grid: rows are replicas of the network, columns the parts that one is cut into.
    Ranks that follow each other share a replica, so that on several hosts the parts of one, which
    communicate most, are close.
    """

    def _place(self) -> None:
        self._num_parts = self.config.tensor_parallel_size
        plan = _plan_of(self.network, self._num_parts)
        if self.ranks.size % self._num_parts:
            raise ConfigurationError(
                f"{self.ranks.size} rank(s) do not divide into replicas of "
                f"tensor_parallel_size={self._num_parts}; start a multiple of it"
            )
        self.data_rank, self._part = divmod(self.ranks.rank, self._num_parts)
        self.data_size = self.ranks.size // self._num_parts
        self._mesh = init_device_mesh(
            self.device.type, (self.data_size, self._num_parts), mesh_dim_names=("replica", "part")
        )
        self._parts: dist.ProcessGroup = self._mesh.get_group("part")
        styles: dict[str, ParallelStyle] = {}
        for name, cut in plan.items():
            if cut != "units":
                styles[name] = ColwiseParallel() if cut == "outputs" else RowwiseParallel()
                continue
            parent, _, child = name.rpartition(".")
            dropout = cast(nn.Dropout, self.network.get_submodule(name))
            replaced = CutDropout(dropout.p, self._part, self._num_parts)
            setattr(self.network.get_submodule(parent), child, replaced)
        # Nothing is sent: all ranks hold the same.
        parallelize_module(self.network, self._mesh["part"], styles, src_data_rank=None)
        self.network.to(self.device)

    def _prepare(self) -> None:
        parameters = dict(self.network.named_parameters())
        self._dimension = {
            name: value.placements[0].dim
            for name, value in parameters.items()
            if isinstance(value, DTensor) and isinstance(value.placements[0], Shard)
        }
        # The optimizer gets plain parameters that share memory with the cut ones: it steps each
        # number by itself, and its fused kernels take no mixture of plain and cut ones.
        self._own = {
            name: nn.Parameter(_local(value), requires_grad=value.requires_grad)
            if isinstance(value, DTensor)
            else value
            for name, value in parameters.items()
        }
        self.gradients = FlatGradients(self._own.items())
        for name, view in self.gradients.views.items():
            value = parameters[name]
            if isinstance(value, DTensor):
                value.grad = DTensor.from_local(view, value.device_mesh, value.placements)

    def _stepped_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._own.items()

    def _held_state(self) -> Mapping[str, Tensor]:
        return {name: _local(value) for name, value in self.network.state_dict().items()}

    def _sum_gradients(self) -> None:
        dist.all_reduce(self.gradients.flat, group=self._mesh.get_group("replica"))
        self.wire_bytes += ring_bytes(self.gradients.flat.nbytes, self.data_size)

    def _sum_over_parts_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over the ranks of this replica."""
        dist.all_reduce(tensor, group=self._parts)

    def train_step(self, batch: Batch, global_rows: int, learning_rate: float) -> Tensor:
        """See `Strategy.train_step`; all ranks of a replica return the sum of its rows' losses."""
        # All parts draw alike, on the CPU and on the GPU.
        state = torch.get_rng_state()
        dist.broadcast(state, group=self._parts, group_src=0)
        torch.set_rng_state(state)
        if self.device.type == "cuda":
            state = torch.cuda.get_rng_state()  # bytes on the CPU
            dist.broadcast(state, group=self._parts, group_src=0)
            torch.cuda.set_rng_state(state)
        return super().train_step(batch, global_rows, learning_rate)

    def _norm(self) -> float:
        """What is cut counts on every part, what is whole once."""
        squares = torch.zeros(2, dtype=torch.float64, device=self.device)
        for name, view in self.gradients.views.items():
            squares[int(name in self._dimension)] += view.double().square().sum()
        whole, cut = squares
        self._sum_over_parts_(cut)
        return math.sqrt(float(whole + cut))

    def _to_plain(self, name: str, part: Tensor) -> Tensor:
        if name not in self._dimension:
            return part
        gathered = [torch.empty_like(part.contiguous()) for _ in range(self._num_parts)]
        dist.all_gather(gathered, part.contiguous(), group=self._parts)
        return torch.cat(gathered, self._dimension[name])

    def _from_plain(self, name: str, whole: Tensor) -> Tensor:
        if name not in self._dimension:
            return whole
        return whole.chunk(self._num_parts, self._dimension[name])[self._part]

    @torch.no_grad()
    def checksum(self) -> list[float]:
        """See `Strategy.checksum`."""
        sums = torch.stack([p.sum(dtype=torch.float64) for p in self._own.values()])
        is_cut = torch.tensor([name in self._dimension for name in self._own], device=sums.device)
        of_all_parts = torch.where(is_cut, sums, 0.0)
        self._sum_over_parts_(of_all_parts)
        checked: list[float] = torch.where(is_cut, of_all_parts, sums).tolist()
        return checked


def _local(value: Tensor) -> Tensor:
    """This rank's part of a cut tensor, in the same memory; a plain one as it is."""
    return cast(DTensor, value.detach()).to_local() if isinstance(value, DTensor) else value


def _plan_of(network: nn.Module, num_parts: int) -> Mapping[str, Cut]:
    """The network's plan: module names and how each is cut; the others stay whole on all ranks.

    Raises:
        ConfigurationError: a layer does not divide.
    """
    plan: Mapping[str, Cut] = cast(Any, network).tensor_parallel_plan()
    for name, cut in plan.items():
        module = network.get_submodule(name)
        if isinstance(module, nn.Linear):
            size = module.out_features if cut == "outputs" else module.in_features
            if size % num_parts:
                raise ConfigurationError(
                    f"{name} has {size} {cut}, which do not divide over tensor_parallel_size="
                    f"{num_parts}; choose hidden_sizes that are multiples of it"
                )
    return plan
