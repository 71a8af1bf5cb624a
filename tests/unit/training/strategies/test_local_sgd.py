import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tasks.training.strategies.base import Batch, State
from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.data_parallel import HorovodStrategy
from tasks.training.strategies.local_sgd import AsynchronousSgd, LocalSgd
from tests.support.training.thread_ranks import ThreadCommunicator, on_threads

RATE = 0.1
ROWS = 12
KINDS: dict[str, type[HorovodStrategy]] = {
    "synchronous": HorovodStrategy,
    "local": LocalSgd,
    "asynchronous": AsynchronousSgd,
}


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(4)
    layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0))
    for parameter in layers.parameters():
        parameter.data.normal_(generator=generator)
    return layers


def sgd(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters], lr=RATE)


def adam(parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in parameters], lr=RATE)


def squares(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square()


def share_of(step: int, rank: int, size: int) -> Batch:
    """A rank's rows of a step, unequally many; in every fifth step all are rank 0's."""
    draw = torch.Generator().manual_seed(step)
    inputs, labels = torch.randn(ROWS, 3, generator=draw), torch.randn(ROWS, generator=draw)
    inner = [ROWS * (n + 1) // size - (n + step) % 3 for n in range(size)]
    if step % 5 == 4:
        inner = [ROWS] * size
    cuts = [0, *inner[:-1], ROWS]
    rows = slice(cuts[rank], cuts[rank + 1])
    return Batch((inputs[rows],), labels[rows])


def build(kind: str, ranks: ThreadCommunicator, local_steps: int, optimizer: Any = sgd) -> Any:
    # Checked by hand: the configuration itself offers one local step only as synchronous training.
    config = StrategyConfig().model_copy(update={"local_steps": local_steps})
    return KINDS[kind](config, ranks, network(), squares, optimizer, torch.device("cpu"))


def train(strategy: Any, steps: range) -> None:
    for step in steps:
        strategy.train_step(share_of(step, strategy.ranks.rank, strategy.ranks.size), ROWS, RATE)


def weights(strategy: Any) -> Tensor:
    return nn.utils.parameters_to_vector(strategy.network.parameters()).detach().clone()


class Oracle:
    """Local SGD of all ranks in plain PyTorch, one after the other."""

    def __init__(self, size: int) -> None:
        self.replicas = [network() for _ in range(size)]
        self.given: list[Tensor] = []

    def step(self, number: int) -> None:
        for rank, replica in enumerate(self.replicas):
            share = share_of(number, rank, len(self.replicas))
            loss = squares(replica(*share.inputs), share.labels).sum() / ROWS * len(self.replicas)
            gradients = torch.autograd.grad(loss, list(replica.parameters()))
            for parameter, gradient in zip(replica.parameters(), gradients, strict=True):
                parameter.data -= RATE * gradient

    @property
    def weights(self) -> list[Tensor]:
        return [nn.utils.parameters_to_vector(r.parameters()).detach() for r in self.replicas]

    def set(self, vectors: Iterable[Tensor]) -> None:
        for replica, vector in zip(self.replicas, vectors, strict=True):
            nn.utils.vector_to_parameters(vector.clone(), replica.parameters())

    def average(self) -> None:
        self.set([torch.stack(self.weights).mean(0)] * len(self.replicas))

    def average_late(self) -> None:
        """Take over the mean of what was given a round ago, and give anew."""
        if self.given:
            mean = torch.stack(self.given).mean(0)
            self.set([w + mean - g for w, g in zip(self.weights, self.given, strict=True)])
        self.given = [w.clone() for w in self.weights]


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("kind", ["local", "asynchronous"])
def test_ranks_step_alone_and_average_as_the_papers_say(kind: str, local_steps: int) -> None:
    oracle = Oracle(2)
    expected = []
    for step in range(10):
        oracle.step(step)
        if (step + 1) % local_steps == 0:
            oracle.average() if kind == "local" else oracle.average_late()
        expected.append(oracle.weights)

    def part(ranks: ThreadCommunicator) -> list[Tensor]:
        strategy = build(kind, ranks, local_steps)
        seen = []
        for step in range(10):
            train(strategy, range(step, step + 1))
            seen.append(weights(strategy))
        return seen

    for rank, seen in enumerate(on_threads(2, part)):
        for of_step, wanted in zip(seen, expected, strict=True):
            torch.testing.assert_close(of_step, wanted[rank], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["local", "asynchronous"])
@pytest.mark.parametrize("taken_at", [4, 5, 6])
def test_a_run_that_was_cut_off_goes_on_as_if_it_had_not_been(kind: str, taken_at: int) -> None:
    def unbroken(ranks: ThreadCommunicator) -> tuple[State, Tensor]:
        strategy = build(kind, ranks, 4, adam)
        train(strategy, range(taken_at))
        state = copy.deepcopy(strategy.state())
        train(strategy, range(taken_at, 14))
        return state, weights(strategy)

    before = on_threads(2, unbroken)

    def resumed(ranks: ThreadCommunicator) -> Tensor:
        strategy = build(kind, ranks, 4, adam)
        train(strategy, range(2))  # whatever it was before no longer counts
        strategy.load(before[0][0])
        train(strategy, range(taken_at, 14))
        return weights(strategy)

    for (_, wanted), of_rank in zip(before, on_threads(2, resumed), strict=True):
        assert torch.equal(of_rank, wanted)
