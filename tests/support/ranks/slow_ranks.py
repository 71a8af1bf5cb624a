"""One rank of a short training over a slow link, timed and profiled: `python -m ... FOLDER`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from tasks.training.strategies.base import Batch
from tasks.training.strategies.build import build_strategy
from tasks.training.strategies.communicators import HorovodCommunicator
from tasks.training.strategies.config import StrategyConfig
from tasks.training.telemetry.profiler import StepProfiler, profiler_variables
from tasks.training.telemetry.step_clock import StepClock

NUM_STEPS = 12
ROWS = 16
WIDTH = 1000
LINK_S = 0.2


class SlowLink(HorovodCommunicator):
    """Ranks with a link between them that takes its time."""

    def begin_sum_(self, tensor: Tensor, name: str) -> Callable[[], None]:
        finish = super().begin_sum_(tensor, name)

        def finish_late() -> None:
            time.sleep(LINK_S)
            finish()

        return finish_late


def row_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.mean(dim=1) - labels).square()


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters], lr=0.01)  # type: ignore[attr-defined]


def main(folder: Path) -> None:
    os.environ |= profiler_variables("horovod")
    torch.set_num_threads(1)
    ranks, network = SlowLink(), nn.Linear(WIDTH, WIDTH)
    device = torch.device("cpu")
    strategy = build_strategy(StrategyConfig(), ranks, network, row_losses, sgd, device)
    batch = Batch((torch.rand(ROWS, WIDTH),), torch.zeros(ROWS))
    with (
        StepClock(folder, ranks.rank) as clock,
        StepProfiler(folder, ranks.rank, 3, with_timeline=True) as profiler,
    ):
        strategy.phase = lambda _: clock.phase("exchange")
        for _ in range(NUM_STEPS):
            sent = strategy.wire_bytes
            with clock.phase("compute"):
                strategy.train_step(batch, ROWS * ranks.size, 0.01)
            clock.add_rows(ROWS)
            clock.add_bytes(strategy.wire_bytes - sent)
            clock.step()
            profiler.step()
    ranks.shut_down()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
