"""The step of ranks that each compute the whole network, on rows of their own."""

from __future__ import annotations

import itertools
import logging
import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from tasks.kernel.errors import TrainingError
from tasks.training.strategies.base import (
    Batch,
    Exchange,
    OptimizerBuilder,
    RowLosses,
    State,
    Strategy,
)
from tasks.training.strategies.blocks import checkpoint_activations
from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.named_optimizer import Describe, NamedOptimizer, as_it_is, on_host
from tasks.training.strategies.precision import LossScale, autocast

LOGGER = logging.getLogger(__name__)


class DataParallel(Strategy):
    """Forward, backward, exchange, clipping and step of ranks with rows of their own.

    A subclass says where the gradients are and how they are summed over the ranks. Evaluation is in
    fp32 whatever the precision of training: the network is judged as it will serve.
    """

    _empty_parts_count: ClassVar[bool] = False
    """True where a backward pass is an exchange, so that no rank may leave one out."""

    def __init__(
        self,
        config: StrategyConfig,
        exchange: Exchange,
        network: nn.Module,
        row_losses: RowLosses,
        build_optimizer: OptimizerBuilder,
        device: torch.device,
    ) -> None:
        self.config = config
        self.exchange = exchange
        self.device = device
        self.network = network
        self._row_losses = row_losses
        self._scale = LossScale.of(config.precision)
        exchange.broadcast_(itertools.chain(network.parameters(), network.buffers()))
        if config.activation_checkpointing:
            checkpoint_activations(network)
        self._place()
        self._prepare()
        self._optimizer = NamedOptimizer(
            build_optimizer, self._stepped_parameters(), self._to_plain, self._from_plain
        )

    @property
    def data_rank(self) -> int:
        """Each rank reads rows of its own."""
        return self.exchange.rank

    @property
    def data_size(self) -> int:
        """Each rank is a replica."""
        return self.exchange.size

    @property
    def num_skipped_steps(self) -> int:
        """Steps that all ranks left out because an fp16 gradient overflowed."""
        return self._scale.num_skipped

    # What a subclass says

    def _place(self) -> None:
        """Put on the device what this rank computes; called once, before `_prepare`."""
        self.network.to(self.device)

    def _prepare(self) -> None:
        """Wrap or cut the network, which is on the device; called once, before the optimizer."""

    def _stepped_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """What the optimizer of this rank steps, by the names of the whole network."""
        return self.network.named_parameters()

    def _held_state(self) -> Mapping[str, Tensor]:
        """What this rank holds of the network's state, by the names of the whole network."""
        return cast(Mapping[str, Tensor], self.network.state_dict())

    @abstractmethod
    def _forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Outputs of the network as it is trained."""

    def _evaluated(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Outputs of the network as it is evaluated: not compiled, since rows vary in number."""
        outputs: Tensor = self.network(*inputs)
        return outputs

    def _exchanging(self, last: bool) -> AbstractContextManager[object]:
        """The context of a backward pass; only the last one of a step may exchange gradients."""
        return nullcontext()

    def _sum_gradients(self) -> None:
        """Replace this rank's gradients by their sums over all ranks, where backward did not."""

    @abstractmethod
    def _gradients(self) -> list[Tensor]:
        """What this rank holds of the gradient."""

    def _loss_factor(self, global_rows: int) -> float:
        """What a sum of row losses is multiplied with before the backward pass."""
        return self._scale.factor / max(global_rows, 1)

    def _gradient_factor(self) -> float:
        """What the exchanged gradients are to be multiplied with."""
        return 1.0 / self._scale.factor

    def _norm(self) -> float:
        """Euclidean norm of the whole gradient, equal on all ranks."""
        return float(torch.nn.utils.get_total_norm(self._gradients()))

    def _scale_gradients(self, factor: float) -> None:
        torch._foreach_mul_(self._gradients(), factor)

    def _clear_gradients(self) -> None:
        for gradient in self._gradients():
            gradient.zero_()

    def _to_plain(self, name: str, part: Tensor) -> Tensor:
        """What this rank holds of a tensor of parameter `name`'s shape, made whole. Collective."""
        return as_it_is(name, part)

    def _from_plain(self, name: str, whole: Tensor) -> Tensor:
        """What this rank holds of a whole tensor of parameter `name`'s shape."""
        return as_it_is(name, whole)

    # The step

    def train_step(self, batch: Batch, global_rows: int, learning_rate: float) -> Tensor:
        """See `Strategy.train_step`.

        Raises:
            TrainingError: the gradient is no number; the sentence names the rank it came from.
        """
        if not self.network.training:
            self.network.train()
        draws = torch.get_rng_state()
        on_device = batch.to(self.device)
        self._clear_gradients()
        loss = self._accumulate(on_device, global_rows)
        with self.phase("exchange"):
            self._sum_gradients()
        norm = self._norm() * self._gradient_factor()
        if math.isfinite(norm):
            self._step(norm, learning_rate)
        elif self._scale.can_fall:
            self._scale.after_overflow()
            LOGGER.debug("fp16 overflow: step skipped, loss scale now %g", self._scale.factor)
        else:
            self._name_the_source(on_device, global_rows, draws)
        return loss

    def _accumulate(self, batch: Batch, global_rows: int) -> Tensor:
        """Add up the gradient of this rank's rows part by part; returns the sum of their losses."""
        total = torch.zeros((), device=self.device)
        parts = list(_parts(batch, self.config.accumulation_steps))
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            if part.num_rows or self._empty_parts_count:
                with self._exchanging(last):
                    loss = self._losses(part).sum()
                    backward = (loss * self._loss_factor(global_rows)).backward
                    backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        return total

    def _losses(self, batch: Batch) -> Tensor:
        with autocast(self.config.precision, self.device):
            outputs = self._forward(batch.inputs)
        return self._row_losses(outputs.float(), batch.labels)

    def _step(self, norm: float, learning_rate: float) -> None:
        limit = self.config.max_gradient_norm
        factor = self._gradient_factor()
        if limit is not None and norm > limit:
            factor *= limit / norm
        if factor != 1.0:
            self._scale_gradients(factor)
        self._optimizer.step(learning_rate)
        self._scale.after_step()

    def _name_the_source(self, batch: Batch, global_rows: int, draws: Tensor) -> None:
        """Compute the step again with the rows of one rank at a time, and tell whose break it.

        Collective. Costs a good step nothing; the weights are still those from before the step.
        """
        none = Batch(tuple(part[:0] for part in batch.inputs), batch.labels[:0])
        breaking = []
        share = self.exchange.size // self.data_size  # ranks of a replica have the same rows
        for rank in range(0, self.exchange.size, share):
            torch.set_rng_state(draws)
            self._clear_gradients()
            self._accumulate(batch if rank // share == self.data_rank else none, global_rows)
            self._sum_gradients()
            if not math.isfinite(self._norm()):
                breaking.append(rank)
        torch.set_rng_state(draws)
        with torch.no_grad():
            losses = self._losses(batch)
        bad_rows = int((~torch.isfinite(losses)).sum())
        seen = cast(list[list[int]], self.exchange.gather_values([bad_rows, batch.num_rows]))
        raise TrainingError(_source_in_words(breaking, seen))

    # Everything else

    @torch.no_grad()
    def evaluate(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """See `Strategy.evaluate`."""
        if self.network.training:
            self.network.eval()
        return self._evaluated(tuple(part.to(self.device) for part in inputs)).float().cpu()

    def state(self) -> State:
        """See `Strategy.state`."""
        return self._described(self._to_plain)

    def _described(self, describe: Describe) -> State:
        """The state with what `describe` makes of each tensor that may be a part."""
        network = {name: on_host(describe(name, v)) for name, v in self._held_state().items()}
        scaler = self._scale.state() if self.config.precision == "fp16" else {}
        optimizer = self._optimizer.state(describe)
        return {"network": network, "optimizer": optimizer, "strategy": scaler}

    @contextmanager
    def judged_with(self, weights: State) -> Iterator[None]:
        """See `Strategy.judged_with`."""
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
        """See `Strategy.load`."""
        check_names(self._held_state().keys(), state["network"].keys())
        self._put(state["network"])
        self._optimizer.load(state["optimizer"])
        self._scale.load(state.get("strategy", {}))

    @torch.no_grad()
    def checksum(self) -> list[float]:
        """See `Strategy.checksum`."""
        sums = [p.detach().sum(dtype=torch.float64) for p in self.network.parameters()]
        return torch.stack(sums).tolist()


def _parts(batch: Batch, count: int) -> Iterator[Batch]:
    """`count` parts of a batch, as equal as possible; some are empty where it is small."""
    if count == 1:
        yield batch
        return
    split = [torch.tensor_split(part, count) for part in (*batch.inputs, batch.labels)]
    for *inputs, labels in zip(*split, strict=True):
        yield Batch(tuple(inputs), labels)


def check_names(expected: Collection[str], seen: Collection[str]) -> None:
    """Refuse a state whose network has other names than this one.

    Raises:
        TrainingError: names are missing or unknown.
    """
    missing, unknown = sorted(set(expected) - set(seen)), sorted(set(seen) - set(expected))
    if missing or unknown:
        raise TrainingError(
            f"a state does not fit the network: it lacks {missing or 'nothing'} and has "
            f"{unknown or 'nothing'} that the network lacks; was it written by another network?"
        )


def _source_in_words(breaking: Sequence[int], seen: Sequence[Sequence[int]]) -> str:
    """A sentence from the ranks whose rows break a gradient, and (bad rows, rows) of all ranks."""
    ranks = [
        f"rank {rank} ({seen[rank][0]} of its {seen[rank][1]} rows have a loss that is NaN or "
        "infinite)"
        for rank in breaking
    ]
    source = " and ".join(ranks) or "the sum over ranks, while the share of each rank is finite"
    return (
        "the gradient of a step is NaN or infinite; expected finite numbers. It comes from "
        f"{source}. The weights were not changed. Look for NaN or extreme values in the rows of "
        "that rank, or lower the learning rate"
    )
