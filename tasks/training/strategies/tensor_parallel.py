"""Layers cut over ranks: each holds some of a layer's units, and all compute every row together.

After Shoeybi et al., "Megatron-LM" (2019): a linear layer whose outputs are cut is followed by one
whose inputs are, so that two layers need one exchange in each direction. For networks that do not
fit one device; combined with replicas, each of which reads rows of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from tasks.kernel.errors import ConfigurationError
from tasks.training.strategies.base import Batch
from tasks.training.strategies.data_parallel import DataParallel
from tasks.training.strategies.flat_gradients import FlatGradients, ring_bytes
from tasks.training.strategies.partition import Cut
from tasks.training.strategies.replica_mesh import ReplicaMesh


@runtime_checkable
class CutNetwork(Protocol):
    """A network that says how it can be cut."""

    def tensor_parallel_plan(self, num_parts: int) -> Mapping[str, Cut]:
        """Module names and how each is cut; modules that are not named stay whole on all ranks.

        Raises:
            ConfigurationError: the network cannot be cut into so many parts.
        """


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


class TensorParallel(DataParallel):
    """Each rank holds its part of the cut layers, of their gradients and of the optimizer's state.

    The whole network is built on the CPU of each rank; only a rank's own part goes to its device.
    State dicts are whole and plain, with the names of the uncut network.
    """

    name: ClassVar[str] = "tensor-parallel"

    @property
    def data_rank(self) -> int:
        """The ranks of a replica read the same rows."""
        return self._mesh.replica

    @property
    def data_size(self) -> int:
        """Number of replicas."""
        return self._mesh.num_replicas

    def _place(self) -> None:
        parts = self.config.tensor_parallel_size
        plan = _plan_of(self.network, parts)
        self._mesh = ReplicaMesh(self.exchange, parts, "tensor_parallel_size", self.device)
        _cut(self.network, plan, self._mesh)
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

    def train_step(self, batch: Batch, global_rows: int, learning_rate: float) -> Tensor:
        """See `Strategy.train_step`; all ranks of a replica return the sum of its rows' losses."""
        self._mesh.share_generator()
        return super().train_step(batch, global_rows, learning_rate)

    def _forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        outputs: Tensor = self.network(*inputs)
        return outputs

    def _sum_gradients(self) -> None:
        self._mesh.sum_over_replicas_(self.gradients.flat)
        self.wire_bytes += ring_bytes(self.gradients.flat.nbytes, self._mesh.num_replicas)

    def _gradients(self) -> list[Tensor]:
        return [self.gradients.flat]

    def _norm(self) -> float:
        """What is cut counts on every part, what is whole once."""
        squares = torch.zeros(2, dtype=torch.float64, device=self.device)
        for name, view in self.gradients.views.items():
            squares[int(name in self._dimension)] += view.double().square().sum()
        whole, cut = squares
        self._mesh.sum_over_parts_(cut)
        return math.sqrt(float(whole + cut))

    def _to_plain(self, name: str, part: Tensor) -> Tensor:
        dimension = self._dimension.get(name)
        if dimension is None:
            return part
        return torch.cat(self._mesh.gather_parts(part.contiguous()), dimension)

    def _from_plain(self, name: str, whole: Tensor) -> Tensor:
        dimension = self._dimension.get(name)
        if dimension is None:
            return whole
        return whole.chunk(self._mesh.num_parts, dimension)[self._mesh.part]

    @torch.no_grad()
    def checksum(self) -> list[float]:
        """See `Strategy.checksum`."""
        sums = torch.stack([p.sum(dtype=torch.float64) for p in self._own.values()])
        is_cut = torch.tensor([name in self._dimension for name in self._own], device=sums.device)
        of_all_parts = torch.where(is_cut, sums, 0.0)
        self._mesh.sum_over_parts_(of_all_parts)
        checked: list[float] = torch.where(is_cut, of_all_parts, sums).tolist()
        return checked


def _local(value: Tensor) -> Tensor:
    """This rank's part of a cut tensor, in the same memory; a plain one as it is."""
    return cast(DTensor, value.detach()).to_local() if isinstance(value, DTensor) else value


def _plan_of(network: nn.Module, num_parts: int) -> Mapping[str, Cut]:
    """The network's plan, checked.

    Raises:
        ConfigurationError: there is none, or a layer does not divide.
    """
    kind = type(network).__name__
    if not isinstance(network, CutNetwork):
        raise ConfigurationError(
            f"{kind} does not say how its layers can be cut: it has no method "
            "tensor_parallel_plan. Use another strategy, such as fsdp, which cuts any network"
        )
    plan = network.tensor_parallel_plan(num_parts)
    for name, cut in plan.items():
        module = network.get_submodule(name)
        if cut == "units":
            continue
        if not isinstance(module, nn.Linear):
            raise ConfigurationError(
                f"{kind}.{name} is a {type(module).__name__}; only linear layers are cut by {cut}"
            )
        size = module.out_features if cut == "outputs" else module.in_features
        if size % num_parts:
            raise ConfigurationError(
                f"{kind}.{name} has {size} {cut}, which do not divide over "
                f"tensor_parallel_size={num_parts}; choose sizes that are multiples of it"
            )
    return plan


def _cut(network: nn.Module, plan: Mapping[str, Cut], mesh: ReplicaMesh) -> None:
    """Cut the modules that the plan names, in place; nothing is sent, all ranks hold the same."""
    styles: dict[str, ParallelStyle] = {}
    for name, cut in plan.items():
        if cut == "outputs":
            styles[name] = ColwiseParallel()
        elif cut == "inputs":
            styles[name] = RowwiseParallel()
        else:
            parent, _, child = name.rpartition(".")
            dropout = cast(nn.Dropout, network.get_submodule(name))
            replaced = CutDropout(dropout.p, mesh.part, mesh.num_parts)
            setattr(network.get_submodule(parent), child, replaced)
    parallelize_module(network, mesh.of_replica, styles, src_data_rank=None)
