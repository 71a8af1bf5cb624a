"""A compiled network takes the steps of one that is not; compiling takes a minute or more."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.data_parallel import HorovodStrategy
from tests.support.ranks.strategy_cases import (
    LEARNING_RATE,
    adamw,
    global_batch,
    row_losses,
    share_of,
)
from tests.support.suite.promises import Promise, proves
from tests.support.training.thread_ranks import Room, ThreadCommunicator

NUM_STEPS = 6
pytestmark = [
    pytest.mark.drill,
    # torch.compile's own imports use it
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


class TinyNetwork(nn.Module):
    """Two layers, so that compiling it is quick."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(6, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, _: Tensor, numbers: Tensor) -> Tensor:
        return self.head(nn.functional.gelu(self.entry(numbers))).squeeze(1)


def curve(compiled: bool) -> list[float]:
    torch.manual_seed(0)
    config = StrategyConfig(compile=compiled)
    arguments = (ThreadCommunicator(Room(1), 0), TinyNetwork(), row_losses, adamw)
    strategy = HorovodStrategy(config, *arguments, torch.device("cpu"))
    losses = []
    for step in range(NUM_STEPS):
        batch = share_of(global_batch(step), step, 0, 2)  # another number of rows in each step
        losses.append(strategy.train_step(batch, 24, LEARNING_RATE).item())
    assert not any(name.startswith("_orig_mod") for name in strategy.state()["network"])
    return losses


@proves(Promise.NO_FALLBACK, "the same result, compiled or not")
def test_compiling_changes_nothing_but_speed() -> None:
    np.testing.assert_allclose(curve(compiled=True), curve(compiled=False), rtol=1e-5)
