"""Stages one after the other: each rank holds some of the layers, and rows pass through in parts.

After Huang et al., "GPipe" (2019), with the schedule of Narayanan et al., "PipeDream" (2021): one
part forward, one backward, so that a stage keeps few activations. For networks that do not fit one
device; combined with replicas, each of which reads rows of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tasks.kernel.errors import ConfigurationError
from tasks.training.strategies.base import Batch, State
from tasks.training.strategies.data_parallel import DataParallel, check_names
from tasks.training.strategies.flat_gradients import FlatGradients, ring_bytes
from tasks.training.strategies.precision import autocast
from tasks.training.strategies.replica_mesh import ReplicaMesh


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


class Stage(nn.Module):
    """One stage in the precision of training; what it passes on is float32."""

    def __init__(self, module: nn.Module, strategy: PipelineParallel) -> None:
        super().__init__()
        self.module = module
        self._precision = strategy.config.precision
        self._device = strategy.device

    def forward(self, *inputs: Tensor) -> Tensor:
        """What the next stage takes; autocast while training, as in `DataParallel`."""
        if not self.training:
            return cast(Tensor, self.module(*inputs)).float()
        with autocast(self._precision, self._device):
            outputs: Tensor = self.module(*inputs)
        return outputs.float()


class PipelineParallel(DataParallel):
    """Each rank holds one stage, its gradients and its part of the optimizer's state.

    A rank's rows pass in `accumulation_steps` parts of equal size, but in at least one for each
    stage; what is missing is filled up with rows that weigh nothing. So dropout, and whatever else
    draws at random, draws other numbers than one process would.

    The whole network is built on the CPU of each rank; only a rank's own stage goes to its device.
    State dicts are whole and plain, with the names of the whole network.
    """

    name: ClassVar[str] = "pipeline-parallel"

    @property
    def data_rank(self) -> int:
        """The ranks of a replica read the same rows."""
        return self._mesh.replica

    @property
    def data_size(self) -> int:
        """Number of replicas."""
        return self._mesh.num_replicas

    def _place(self) -> None:
        count = self.config.pipeline_stages
        stages = _stages_of(self.network, count)
        self._mesh = ReplicaMesh(self.exchange, count, "pipeline_stages", self.device)
        self._names = list(self.network.state_dict())
        self._parameter_names = [name for name, _ in self.network.named_parameters()]
        own = stages[self._mesh.part]
        whole_names = {id(value): name for name, value in _state_of(self.network).items()}
        self._whole_name = {
            f"module.{name}": whole_names[id(value)] for name, value in _state_of(own).items()
        }
        self.network = Stage(own, self).to(self.device)  # all else is given up

    def _prepare(self) -> None:
        self.gradients = FlatGradients(self._stepped_parameters())
        self._num_parts = max(self.config.accumulation_steps, self.config.pipeline_stages)
        self._row_shapes: list[list[int]] = []
        self._part_rows = 0
        self._schedule: Schedule1F1B | None = None

    @property
    def _is_first(self) -> bool:
        return self._mesh.part == 0

    @property
    def _is_last(self) -> bool:
        return self._mesh.part == self._mesh.num_parts - 1

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
            filled = filled_up(batch, self._num_parts * self._part_rows)
            self._judged = Judged(filled.labels, batch.num_rows, self._loss_factor(global_rows))
            inputs = filled.inputs if self._is_first else ()
            rows = torch.arange(filled.num_rows, device=self.device) if self._is_last else None
            schedule.step(*inputs, target=rows, return_outputs=False)
            loss += self._judged.total
        with self.phase("exchange"):
            self._mesh.broadcast_from_part_(loss, self._mesh.num_parts - 1)
        return loss

    def _schedule_for(self, num_rows: int) -> Schedule1F1B:
        """The schedule for parts of at least as many rows; built anew where they grow."""
        part_rows = -(-num_rows // self._num_parts)
        if self._schedule is None or part_rows > self._part_rows:
            self._part_rows = part_rows
            self._schedule = self._build_schedule()
        return self._schedule

    def _build_schedule(self) -> Schedule1F1B:
        # With all sizes known torch asks no other rank for them: it would send pickled objects.
        sizes = [torch.empty(self._part_rows, *shape, device="meta") for shape in self._row_shapes]
        number = self._mesh.part
        stage = PipelineStage(
            self.network,
            number,
            self._mesh.num_parts,
            self.device,
            input_args=self._input_sizes if self._is_first else sizes[number - 1].requires_grad_(),
            output_args=sizes[number].requires_grad_(),
            group=self._mesh.parts,
        )
        return Schedule1F1B(stage, self._num_parts, loss_fn=self._part_loss, scale_grads=False)

    @property
    def _input_sizes(self) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty(self._part_rows, *shape, dtype=dtype, device="meta")
            for shape, dtype in self._input_rows
        )

    def _part_loss(self, outputs: Tensor, rows: Tensor) -> Tensor:
        return self._judged.loss(self._row_losses(outputs, self._judged.labels[rows]), rows)

    def _losses(self, batch: Batch) -> Tensor:
        return self._row_losses(self._evaluated(batch.inputs), batch.labels)

    def _forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return self._evaluated(inputs)

    def _sum_gradients(self) -> None:
        self._mesh.sum_over_replicas_(self.gradients.flat)
        self.wire_bytes += ring_bytes(self.gradients.flat.nbytes, self._mesh.num_replicas)

    def _gradients(self) -> list[Tensor]:
        return [self.gradients.flat]

    def _norm(self) -> float:
        square = self.gradients.flat.double().square().sum()
        self._mesh.sum_over_parts_(square)
        return math.sqrt(float(square))

    # Everything else

    @torch.no_grad()
    def _evaluated(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Outputs on all ranks of the replica; the stages compute one after the other."""
        self._learn_shapes(inputs)
        num_rows, part = len(inputs[0]), self._mesh.part
        passed = inputs
        if not self._is_first:
            passed = (torch.empty(num_rows, *self._row_shapes[part - 1], device=self.device),)
            dist.recv(passed[0], group=self._mesh.parts, group_src=part - 1)
        outputs: Tensor = self.network(*passed)
        if not self._is_last:
            dist.send(outputs.contiguous(), group=self._mesh.parts, group_dst=part + 1)
            outputs = torch.empty(num_rows, *self._row_shapes[-1], device=self.device)
        outputs = outputs.contiguous()
        self._mesh.broadcast_from_part_(outputs, self._mesh.num_parts - 1)
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
        for number in range(self._mesh.num_parts):
            mine = list(self.network(*passed).shape[1:]) if number == self._mesh.part else None
            seen = cast(list[Any], self.exchange.gather_values(mine))
            self._row_shapes.append(seen[number])
            passed = (torch.zeros(2, *seen[number], device=self.device),)
        self.network.train(was_training)

    def state(self) -> State:
        """See `Strategy.state`."""
        state = super().state()
        network, optimizer = self._gathered(state["network"]), self._gathered(state["optimizer"])
        return {
            **state,
            "network": {name: network[name] for name in self._names},
            "optimizer": optimizer,
        }

    def _gathered(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of all stages: tensors through their owner's broadcast, numbers as JSON."""
        outline = {
            name: [list(value.shape), str(value.dtype).removeprefix("torch.")]
            if isinstance(value, Tensor)
            else value
            for name, value in own.items()
        }
        outlines = cast(list[dict[str, Any]], self.exchange.gather_values(outline))
        first = self._mesh.replica * self._mesh.num_parts
        whole: dict[str, Any] = {}
        for stage, of_stage in enumerate(outlines[first : first + self._mesh.num_parts]):
            for name, value in of_stage.items():
                if isinstance(value, list):
                    shape, dtype = value
                    held = own.get(name, torch.empty(shape, dtype=getattr(torch, dtype)))
                    sent = held.to(self.device)
                    self._mesh.broadcast_from_part_(sent, stage)
                    whole.setdefault(name, sent.cpu())
                else:
                    whole.setdefault(name, value)
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
        self._mesh.sum_over_parts_(sums)
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
            f"{kind} does not say how it can be laid out in stages: it has no method "
            "pipeline_stages. Use another strategy, such as fsdp, which cuts any network"
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
