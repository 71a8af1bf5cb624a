"""The step of ranks that train one network together, and its two plain forms.

The training loop hands over batches and gets losses; forward, backward, the sum of gradients,
precision and the optimizer's step belong to the strategy. So the loop is the same on Horovod and on
torch.distributed, with whole replicas and with a network cut over ranks.

One rule makes strategies and world sizes interchangeable: the loss of a step is the sum of all
rows' losses over all ranks, divided by the rows of the global batch. A gradient is the sum of the
ranks' shares, never a mean of means, so ranks may have unequal numbers of rows.
"""

import itertools
import logging
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tasks.kernel.errors import TrainingError
from tasks.training.strategies import optimizer as optimizers
from tasks.training.strategies.base import Batch, Communicator, OptimizerBuilder, RowLosses, State
from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.gradient_compression import gradient_sum

LOGGER = logging.getLogger(__name__)


class Strategy:
    """Forward, backward, sum over ranks, clipping and step. All public methods are collective.

    A subclass defines where the gradients are and how they are summed over the ranks. Evaluation is
    in fp32 whatever the precision of training: the network is judged as it will serve.

    Args:
        config: precision, clipping, accumulation.
        ranks: who trains, from `join`.
        network: on the CPU; from now on the strategy's.
        row_losses: (outputs, labels) to the loss of each row.
        build_optimizer: called once, with the parameters that this rank steps.
        device: where the network is put.
    """

    _empty_batches_count: ClassVar[bool] = False
    """True where a backward pass is a collective, so that no rank may leave one out."""

    gradients: optimizers.FlatGradients
    """Made by `_prepare`, unless torch keeps the gradients."""
    phase: Callable[[str], AbstractContextManager[object]] = nullcontext
    """Called with "exchange" around what a step waits for other ranks; a clock's may be set."""

    def __init__(
        self,
        config: StrategyConfig,
        ranks: Communicator,
        network: nn.Module,
        row_losses: RowLosses,
        build_optimizer: OptimizerBuilder,
        device: torch.device,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.device = device
        self.network = network
        self.wire_bytes = 0
        """Bytes of gradients and weights that this rank has sent, as far as the strategy sees."""
        self._row_losses = row_losses
        self._scale = optimizers.LossScale.of(config.precision)
        ranks.broadcast_(itertools.chain(network.parameters(), network.buffers()))
        self.network.to(device)
        self._trained = cast(nn.Module, torch.compile(network) if config.compile else network)
        """The network as it is trained; `_prepare` may wrap it."""
        self._prepare()
        self._optimizer = optimizers.NamedOptimizer(
            build_optimizer, self.network.named_parameters()
        )

    # What a subclass defines

    def _prepare(self) -> None:
        """Wrap or cut the network, which is on the device; called once, before the optimizer."""

    def _held_state(self) -> Mapping[str, Tensor]:
        """What this rank holds of the network's state."""
        return cast(Mapping[str, Tensor], self.network.state_dict())

    def _evaluated(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Outputs of the network as it is evaluated: not compiled, since rows vary in number."""
        outputs: Tensor = self.network(*inputs)
        return outputs

    def _exchanging(self, last: bool) -> AbstractContextManager[object]:
        """The context of a backward pass; only the last one of a step may sum gradients."""
        return nullcontext()

    def _sum_gradients(self) -> None:
        """Replace this rank's gradients by their sums over all ranks, where backward did not."""

    def _gradients(self) -> list[Tensor]:
        """What this rank holds of the gradient."""
        return [self.gradients.flat]

    def _loss_factor(self, global_rows: int) -> float:
        """What a sum of row losses is multiplied with before the backward pass."""
        return self._scale.factor / max(global_rows, 1)

    def _gradient_factor(self) -> float:
        """What the summed gradients are to be multiplied with."""
        return 1.0 / self._scale.factor

    def _norm(self) -> float:
        """Euclidean norm of the whole gradient, equal on all ranks."""
        return float(torch.nn.utils.get_total_norm(self._gradients()))

    def _clear_gradients(self) -> None:
        for gradient in self._gradients():
            gradient.zero_()

    def _to_plain(self, name: str, part: Tensor) -> Tensor:
        """What this rank holds of a tensor of parameter `name`'s shape, made whole. Collective."""
        return optimizers.as_it_is(name, part)

    def _from_plain(self, name: str, whole: Tensor) -> Tensor:
        """What this rank holds of a whole tensor of parameter `name`'s shape."""
        return optimizers.as_it_is(name, whole)

    # The step

    def train_step(self, batch: Batch, global_rows: int, learning_rate: float) -> Tensor:
        """Train on this rank's rows of one global batch.

        Args:
            batch: this rank's rows; may be none, the rank takes part all the same.
            global_rows: rows of all ranks in this step.
            learning_rate: of this step.

        Returns:
            Sum of this rank's row losses before the step, float32 scalar on the device, detached.

        Raises:
            TrainingError: the gradient is no number; the message names the rank it came from.
        """
        if not self.network.training:
            self.network.train()
        on_device = batch.to(self.device)
        self._clear_gradients()
        loss = self._accumulate(on_device, global_rows)
        with self.phase("exchange"):
            self._sum_gradients()
        norm = self._norm() * self._gradient_factor()
        if math.isfinite(norm):
            self._step(norm, learning_rate)
        elif self._scale.factor > 1:
            self._scale.after_overflow()
            LOGGER.debug("fp16 overflow: step skipped, loss scale now %g", self._scale.factor)
        else:
            self._name_the_source(on_device)
        return loss

    def _accumulate(self, batch: Batch, global_rows: int) -> Tensor:
        """Add up the gradient of this rank's rows part by part; returns the sum of their losses."""
        total = torch.zeros((), device=self.device)
        count = self.config.accumulation_steps
        for number, part in enumerate(_parts(batch, count), start=1):
            if part.num_rows or self._empty_batches_count:
                with self._exchanging(last=number == count):
                    loss = self._losses(part).sum()
                    backward = (loss * self._loss_factor(global_rows)).backward
                    backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        return total

    def _losses(self, batch: Batch) -> Tensor:
        with optimizers.autocast(self.config.precision, self.device):
            outputs = self._trained(*batch.inputs)
        return self._row_losses(outputs.float(), batch.labels)

    def _step(self, norm: float, learning_rate: float) -> None:
        limit, factor = self.config.max_gradient_norm, self._gradient_factor()
        if limit is not None and norm > limit:
            factor *= limit / norm
        if factor != 1.0:
            torch._foreach_mul_(self._gradients(), factor)
        self._optimizer.step(learning_rate)
        if self.config.precision == "fp16":
            self._scale.after_step()

    def _name_the_source(self, batch: Batch) -> NoReturn:
        """Name the ranks whose rows break a step; the weights are those from before. Collective."""
        with torch.no_grad():
            losses = self._losses(batch)
        bad_rows = int((~torch.isfinite(losses)).sum())
        seen = cast(list[list[int]], self.ranks.gather_values([bad_rows, batch.num_rows]))
        source = " and ".join(
            f"rank {rank} ({bad} of its {num_rows} rows have a loss that is NaN or infinite)"
            for rank, (bad, num_rows) in enumerate(seen)
            if bad
        )
        raise TrainingError(
            "the gradient of a step is NaN or infinite. It comes from "
            f"{source or 'rows whose losses are all finite'}. The weights were not changed. Look "
            "for NaN or extreme values in these rows, or lower the learning rate"
        )

    # Evaluation and state

    @torch.no_grad()
    def evaluate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Outputs in evaluation mode, float32 on the CPU, for this rank's inputs; no gradient.

        Where the network is cut over ranks each rank must call it equally often, with no rows when
        it has none left.
        """
        if self.network.training:
            self.network.eval()
        return self._evaluated(tuple(part.to(self.device) for part in inputs)).float().cpu()

    def state(self) -> State:
        """`network` and `optimizer` as plain whole state dicts on the CPU, whatever the strategy.

        `network` maps parameter and buffer names to tensors; `optimizer` maps "name/field" to
        tensors and numbers, such as "perceptron.0.weight/exp_avg". What belongs to the strategy
        alone (a gradient scaler, error feedback) is under `strategy`.
        """
        held = self._held_state().items()
        network = {name: optimizers.on_host(self._to_plain(name, part)) for name, part in held}
        optimizer = self._optimizer.state(self._to_plain)
        scale = self._scale.state() if self.config.precision == "fp16" else {}
        return {"network": network, "optimizer": optimizer, "strategy": scale}

    @contextmanager
    def judged_with(self, weights: State) -> Iterator[None]:
        """Evaluate with other weights inside the context, and train on with the own ones after it.

        Args:
            weights: whole tensors by the names of `state`'s `network`, the same on all ranks.
        """
        own = {name: value.clone() for name, value in self._held_state().items()}
        self._put(weights)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in self._held_state().items():
                    value.copy_(own[name])

    @torch.no_grad()
    def _put(self, weights: State) -> None:
        for name, value in self._held_state().items():
            value.copy_(self._from_plain(name, weights[name]))

    def load(self, state: State) -> None:
        """Take over what `state` of any strategy and world size gave.

        Raises:
            TrainingError: it was written by another network.
        """
        if different := self._held_state().keys() ^ state["network"].keys():
            raise TrainingError(
                f"a state does not fit the network: {', '.join(sorted(different))} is in only one "
                "of them; was it written by another network?"
            )
        self._put(state["network"])
        self._optimizer.load(state["optimizer"], self._from_plain)
        if self.config.precision == "fp16":
            self._scale.load(state.get("strategy", {}))

    @torch.no_grad()
    def checksum(self) -> list[float]:
        """One float64 sum for each parameter of this rank's replica, equal on all replicas."""
        sums = [p.detach().sum(dtype=torch.float64) for p in self.network.parameters()]
        return torch.stack(sums).tolist()


class HorovodStrategy(Strategy):
    """The default: whole replicas; works over any communicator, with compression and elastic jobs.

    Nothing is wrapped: the optimizer is a plain one, and the network stays as it is.
    """

    def _prepare(self) -> None:
        self.gradients = optimizers.FlatGradients(self.network.named_parameters())
        self._sum = gradient_sum(self.config, self.ranks)

    def _sum_gradients(self) -> None:
        self.wire_bytes += self._sum.sum_(self.gradients)

    def state(self) -> State:
        """See `Strategy.state`."""
        state = super().state()
        state["strategy"].update(self._sum.state())
        return state

    def load(self, state: State) -> None:
        """See `Strategy.load`."""
        super().load(state)
        self._sum.load(state.get("strategy", {}))


class DdpStrategy(Strategy):
    """Gradients travel in buckets while the backward pass goes on.

    A network some of whose parameters have no part in the loss is refused by torch at the second
    step; the Horovod strategy takes it.
    """

    _empty_batches_count: ClassVar[bool] = True

    def _prepare(self) -> None:
        self._trained = self._wrapped = DistributedDataParallel(
            self._trained,
            forward_sync_buffers=False,
            init_sync=False,  # `Strategy` has given all ranks rank 0's parameters
            gradient_as_bucket_view=True,
        )
        trained = [p for p in self.network.parameters() if p.requires_grad]
        self._num_bytes = sum(p.numel() * p.element_size() for p in trained)

    def _exchanging(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self._wrapped.no_sync()

    # DDP divides by the number of ranks what it sums. In fp16 the loss has no room for that number,
    # and the gradients are to be multiplied in any case.

    def _loss_factor(self, global_rows: int) -> float:
        before = 1 if self.config.precision == "fp16" else self.ranks.size
        return super()._loss_factor(global_rows) * before

    def _gradient_factor(self) -> float:
        after = self.ranks.size if self.config.precision == "fp16" else 1
        return super()._gradient_factor() * after

    def _sum_gradients(self) -> None:
        self.wire_bytes += optimizers.ring_bytes(self._num_bytes, self.ranks.size)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.network.parameters() if p.grad is not None]


def _parts(batch: Batch, count: int) -> Iterator[Batch]:
    """`count` parts of a batch, as equal as possible; some are empty where it is small."""
    split = [torch.tensor_split(part, count) for part in (*batch.inputs, batch.labels)]
    for *inputs, labels in zip(*split, strict=True):
        yield Batch(tuple(inputs), labels)


STRATEGIES = {
    "horovod": "tasks.training.strategies.data_parallel:HorovodStrategy",
    "ddp": "tasks.training.strategies.data_parallel:DdpStrategy",
    "fsdp": "tasks.training.strategies.sharded:FsdpStrategy",
    "local-sgd": "tasks.training.strategies.local_sgd:LocalSgd",
    "asynchronous": "tasks.training.strategies.local_sgd:AsynchronousSgd",
}


def strategy_class(config: StrategyConfig) -> type[Strategy]:
    """What a configuration asks for: how a rank steps comes before which library carries its sums.

    To be built on all ranks at once: that ends with rank 0's parameters on all of them.
    """
    kind: str = config.name
    if config.asynchronous:
        kind = "asynchronous"
    elif config.local_steps > 1:
        kind = "local-sgd"
    elif config.gradient_compression != "none":
        kind = "horovod"  # compression needs all gradients in one buffer, which DDP does not have
    return cast(type[Strategy], pkgutil.resolve_name(STRATEGIES[kind]))
