"""A network cut over ranks that share a replica: layer by layer, or in stages one after the other.

For networks that do not fit one device; combined with replicas, each of which reads rows of its
own. The whole network is built on the CPU of each rank; only a rank's own part goes to its device.
State dicts are whole and plain, with the names of the uncut network.

Tensor parallel is after Shoeybi et al., "Megatron-LM" (2019): a linear layer whose outputs are cut
is followed by one whose inputs are, so that two layers need one collective in each direction. The
pipeline is after Huang et al., "GPipe" (2019), with the schedule of Narayanan et al., "PipeDream"
(2021): one part forward, one backward, so that a stage keeps few activations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from tasks.kernel.errors import ConfigurationError
from tasks.training.strategies.base import Batch, Cut, State
from tasks.training.strategies.data_parallel import FlatDataParallel, check_names
from tasks.training.strategies.optimizer import FlatGradients, autocast, ring_bytes


@runtime_checkable
class CutNetwork(Protocol):
    """A network that defines how its layers can be cut."""

    def tensor_parallel_plan(self, num_parts: int) -> Mapping[str, Cut]:
        """Module names and how each is cut; modules that are not named stay whole on all ranks.

        Raises:
            ConfigurationError: the network cannot be cut into so many parts.
        """


@runtime_checkable
class StagedNetwork(Protocol):
    """A network that can be laid out in stages."""

    def pipeline_stages(self, num_stages: int) -> list[nn.Module]:
        """Modules that give the network's outputs when each takes what the one before returns.

        They share the network's parameters and buffers. The first takes the network's inputs; all
        pass on one float tensor, whose first dimension are rows, each computed by itself.

        Raises:
            ConfigurationError: the network has fewer blocks than stages.
        """


class ModelParallel(FlatDataParallel):
    """Ranks as a grid: rows are replicas of the network, columns the parts that one is cut into.

    Ranks that follow each other share a replica, so that on several hosts the parts of one, which
    communicate most, are close.
    """

    def _make_grid(self, field: str) -> None:
        """Divide the ranks into replicas of as many parts as the configuration's field has.

        Raises:
            ConfigurationError: the ranks cannot be divided so.
        """
        num_parts: int = getattr(self.config, field)
        if self.ranks.name != "torch":
            raise ConfigurationError(
                f"{field}={num_parts} needs torch.distributed; these ranks communicate by "
                f"{self.ranks.name}. Launch them for strategy {self.name!r}"
            )
        if self.ranks.size % num_parts:
            raise ConfigurationError(
                f"{self.ranks.size} rank(s) do not divide into replicas of {field}={num_parts}; "
                f"start a multiple of {num_parts} ranks"
            )
        self._num_parts = num_parts
        self._num_replicas = self.ranks.size // num_parts
        self._replica, self._part = divmod(self.ranks.rank, num_parts)
        self._mesh = init_device_mesh(
            self.device.type, (self._num_replicas, num_parts), mesh_dim_names=("replica", "part")
        )
        self._parts: dist.ProcessGroup = self._mesh.get_group("part")

    @property
    def data_rank(self) -> int:
        """The ranks of a replica read the same rows."""
        return self._replica

    @property
    def data_size(self) -> int:
        """Number of replicas."""
        return self._num_replicas

    def _sum_gradients(self) -> None:
        dist.all_reduce(self.gradients.flat, group=self._mesh.get_group("replica"))
        self.wire_bytes += ring_bytes(self.gradients.flat.nbytes, self._num_replicas)

    def _sum_over_parts_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over the ranks of this replica."""
        dist.all_reduce(tensor, group=self._parts)

    def _broadcast_from_part_(self, tensor: Tensor, part: int) -> None:
        """Replace `tensor` on the ranks of this replica by that of one of them."""
        dist.broadcast(tensor, group=self._parts, group_src=part)


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


class TensorParallel(ModelParallel):
    """Each rank holds its part of the cut layers, of their gradients and of the optimizer state."""

    name: ClassVar[str] = "tensor-parallel"

    def _place(self) -> None:
        plan = _plan_of(self.network, self.config.tensor_parallel_size)
        self._make_grid("tensor_parallel_size")
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

    def train_step(self, batch: Batch, global_rows: int, learning_rate: float) -> Tensor:
        """See `Strategy.train_step`; all ranks of a replica return the sum of its rows' losses."""
        # All parts draw alike, on the CPU and on the GPU.
        state = torch.get_rng_state()
        self._broadcast_from_part_(state, 0)
        torch.set_rng_state(state)
        if self.device.type == "cuda":
            state = torch.cuda.get_rng_state()  # bytes on the CPU
            self._broadcast_from_part_(state, 0)
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
    """The network's plan, checked.

    Raises:
        ConfigurationError: there is none, or a layer does not divide.
    """
    kind = type(network).__name__
    if not isinstance(network, CutNetwork):
        raise ConfigurationError(
            f"{kind} has no method tensor_parallel_plan, which defines how its layers are cut. Use "
            "another strategy, such as fsdp, which cuts any network"
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


class Stage(nn.Module):
    """One stage in the precision of training; what it passes on is float32."""

    def __init__(self, module: nn.Module, strategy: PipelineParallel) -> None:
        super().__init__()
        self.module = module
        self._precision = strategy.config.precision
        self._device = strategy.device

    def forward(self, *inputs: Tensor) -> Tensor:
        """What the next stage takes; autocast while training, as in `DataParallel`."""
        with autocast(self._precision if self.training else "fp32", self._device):
            outputs: Tensor = self.module(*inputs)
        return outputs.float()


class PipelineParallel(ModelParallel):
    """Each rank holds one stage, its gradients and its part of the optimizer's state.

    A rank's rows pass in `accumulation_steps` parts of equal size, but in at least one for each
    stage; what is missing is filled up with rows that weigh nothing. So dropout, and whatever else
    draws at random, draws other numbers than one process would.
    """

    name: ClassVar[str] = "pipeline-parallel"

    def _place(self) -> None:
        stages = _stages_of(self.network, self.config.pipeline_stages)
        self._make_grid("pipeline_stages")
        self._last = self._num_parts - 1
        self._names = list(self.network.state_dict())
        self._parameter_names = [name for name, _ in self.network.named_parameters()]
        own = stages[self._part]
        whole_names = {id(value): name for name, value in _state_of(self.network).items()}
        self._whole_name = {
            f"module.{name}": whole_names[id(value)] for name, value in _state_of(own).items()
        }
        self.network = Stage(own, self).to(self.device)  # all else is given up

    def _prepare(self) -> None:
        self.gradients = FlatGradients(self._stepped_parameters())
        self._num_batch_parts = max(self.config.accumulation_steps, self.config.pipeline_stages)
        self._row_shapes: list[list[int]] = []
        self._part_rows = 0
        self._schedule: Schedule1F1B | None = None

    def _stepped_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return [(self._whole_name[name], p) for name, p in self.network.named_parameters()]

    def _held_state(self) -> Mapping[str, Tensor]:
        own = self.network.state_dict()
        return {self._whole_name[name]: value for name, value in own.items()}

    # The step

    def train_step(self, batch: Batch, global_rows: int, learning_rate: float) -> Tensor:
        """See `Strategy.train_step`; all ranks of a replica return the sum of its rows' losses."""
        self._learn_shapes(batch.inputs)
        return super().train_step(batch, global_rows, learning_rate)

    def _accumulate(self, batch: Batch, global_rows: int) -> Tensor:
        loss = torch.zeros((), device=self.device)
        if batch.num_rows:
            schedule = self._schedule_for(batch.num_rows)
            filled = filled_up(batch, self._num_batch_parts * self._part_rows)
            self._judged = Judged(filled.labels, batch.num_rows, self._loss_factor(global_rows))
            inputs = filled.inputs if self._part == 0 else ()
            is_last = self._part == self._last
            rows = torch.arange(filled.num_rows, device=self.device) if is_last else None
            schedule.step(*inputs, target=rows, return_outputs=False)
            loss += self._judged.total
        with self.phase("exchange"):
            self._broadcast_from_part_(loss, self._last)
        return loss

    def _schedule_for(self, num_rows: int) -> Schedule1F1B:
        """The schedule for parts of at least as many rows; built again where they grow."""
        part_rows = -(-num_rows // self._num_batch_parts)
        if self._schedule is None or part_rows > self._part_rows:
            self._part_rows = part_rows
            self._schedule = self._build_schedule()
        return self._schedule

    def _build_schedule(self) -> Schedule1F1B:
        # With all sizes known torch asks no other rank for them: it would send pickled objects.
        sizes = [torch.empty(self._part_rows, *shape, device="meta") for shape in self._row_shapes]
        first_inputs = tuple(
            torch.empty(self._part_rows, *shape, dtype=dtype, device="meta")
            for shape, dtype in self._input_rows
        )
        stage = PipelineStage(
            self.network,
            self._part,
            self._num_parts,
            self.device,
            input_args=first_inputs if self._part == 0 else sizes[self._part - 1].requires_grad_(),
            output_args=sizes[self._part].requires_grad_(),
            group=self._parts,
        )
        return Schedule1F1B(
            stage, self._num_batch_parts, loss_fn=self._part_loss, scale_grads=False
        )

    def _part_loss(self, outputs: Tensor, rows: Tensor) -> Tensor:
        return self._judged.loss(self._row_losses(outputs, self._judged.labels[rows]), rows)

    def _losses(self, batch: Batch) -> Tensor:
        return self._row_losses(self._evaluated(batch.inputs), batch.labels)

    def _norm(self) -> float:
        square = self.gradients.flat.double().square().sum()
        self._sum_over_parts_(square)
        return math.sqrt(float(square))

    # Evaluation and state

    @torch.no_grad()
    def _evaluated(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Outputs on all ranks of the replica; the stages compute one after the other."""
        self._learn_shapes(inputs)
        num_rows, part = len(inputs[0]), self._part
        passed = inputs
        if part != 0:
            passed = (torch.empty(num_rows, *self._row_shapes[part - 1], device=self.device),)
            dist.recv(passed[0], group=self._parts, group_src=part - 1)
        outputs: Tensor = self.network(*passed)
        if part != self._last:
            dist.send(outputs.contiguous(), group=self._parts, group_dst=part + 1)
            outputs = torch.empty(num_rows, *self._row_shapes[-1], device=self.device)
        outputs = outputs.contiguous()
        self._broadcast_from_part_(outputs, self._last)
        return outputs

    @torch.no_grad()
    def _learn_shapes(self, inputs: tuple[Tensor, ...]) -> None:
        """Find out once what each stage makes of a row; collective over all ranks."""
        if self._row_shapes:
            return
        self._input_rows = [(part.shape[1:], part.dtype) for part in inputs]
        was_training = self.network.training
        self.network.eval()
        passed = tuple(part.new_zeros(2, *part.shape[1:], device=self.device) for part in inputs)
        for number in range(self._num_parts):
            mine = list(self.network(*passed).shape[1:]) if number == self._part else None
            seen = cast(list[Any], self.ranks.gather_values(mine))
            self._row_shapes.append(seen[number])
            passed = (torch.zeros(2, *seen[number], device=self.device),)
        self.network.train(was_training)

    def state(self) -> State:
        """See `Strategy.state`."""
        state = super().state()
        network, optimizer = self._gathered(state["network"]), self._gathered(state["optimizer"])
        ordered = {name: network[name] for name in self._names}
        return {**state, "network": ordered, "optimizer": optimizer}

    def _gathered(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of all stages: tensors through their owner's broadcast, numbers as JSON."""
        outline = {
            name: [list(value.shape), str(value.dtype).removeprefix("torch.")]
            if isinstance(value, Tensor)
            else value
            for name, value in own.items()
        }
        outlines = cast(list[dict[str, Any]], self.ranks.gather_values(outline))
        first = self._replica * self._num_parts
        whole: dict[str, Any] = {}
        for stage, of_stage in enumerate(outlines[first : first + self._num_parts]):
            for name, value in of_stage.items():
                if not isinstance(value, list):
                    whole.setdefault(name, value)
                    continue
                shape, dtype = value
                held = own.get(name, torch.empty(shape, dtype=getattr(torch, dtype)))
                sent = held.to(self.device)
                self._broadcast_from_part_(sent, stage)
                whole.setdefault(name, sent.cpu())
        return whole

    def load(self, state: State) -> None:
        """See `Strategy.load`."""
        check_names(self._names, state["network"].keys())
        own = self._held_state()
        super().load({**state, "network": {name: state["network"][name] for name in own}})

    @torch.no_grad()
    def checksum(self) -> list[float]:
        """See `Strategy.checksum`."""
        position = {name: number for number, name in enumerate(self._parameter_names)}
        sums = torch.zeros(len(position), dtype=torch.float64, device=self.device)
        for name, parameter in self._stepped_parameters():
            sums[position[name]] = parameter.sum(dtype=torch.float64)
        self._sum_over_parts_(sums)
        checked: list[float] = sums.tolist()
        return checked


class Judged:
    """The labels of one batch on the last stage, and the sum of its rows' losses so far."""

    def __init__(self, labels: Tensor, num_rows: int, factor: float) -> None:
        self.labels = labels
        self.total = torch.zeros((), device=labels.device)
        self._num_rows = num_rows
        self._factor = factor

    def loss(self, losses: Tensor, rows: Tensor) -> Tensor:
        """The part of the batch's loss that these rows have; rows that fill up have none."""
        # Chosen, not multiplied by 0: what fills up may have a loss that is no number.
        counted = losses.masked_select(rows < self._num_rows).sum()
        self.total += counted.detach()
        return counted * self._factor


def filled_up(batch: Batch, num_rows: int) -> Batch:
    """The batch with rows of zeros behind it."""

    def fill(part: Tensor) -> Tensor:
        return torch.cat([part, part.new_zeros(num_rows - len(part), *part.shape[1:])])

    return Batch(tuple(fill(part) for part in batch.inputs), fill(batch.labels))


def _stages_of(network: nn.Module, count: int) -> list[nn.Module]:
    """The network's stages, checked: each parameter is in one of them.

    Raises:
        ConfigurationError: it cannot be laid out in so many stages.
    """
    kind = type(network).__name__
    if not isinstance(network, StagedNetwork):
        raise ConfigurationError(
            f"{kind} has no method pipeline_stages, which lays it out in stages. Use another "
            "strategy, such as fsdp, which cuts any network"
        )
    stages = network.pipeline_stages(count)
    owners = Counter(id(value) for stage in stages for value in _state_of(stage).values())
    own = _state_of(network)
    misplaced = [name for name, p in network.named_parameters() if owners[id(p)] != 1]
    misplaced += [name for name, value in own.items() if id(value) not in owners]
    if len(stages) != count or misplaced or owners.keys() - {id(value) for value in own.values()}:
        raise ConfigurationError(
            f"{kind}.pipeline_stages gives {len(stages)} stages that do not make up the network; "
            f"expected {count}, with each of its parameters in exactly one, and nothing else. "
            f"Misplaced: {', '.join(misplaced) or 'none of the network'}"
        )
    for number, stage in enumerate(stages):
        if not any(p.requires_grad for p in stage.parameters()):
            raise ConfigurationError(
                f"stage {number} of {count} of {kind} has no parameter to train; ask for fewer "
                "pipeline_stages, or mend pipeline_stages of the network"
            )
    return stages


def _state_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name: the tensors themselves, so that they can be recognised."""
    return cast(dict[str, Tensor], module.state_dict(keep_vars=True))
