"""One rank of trainings that are slow on purpose: `python -m ... FOLDER`.

Three trainings one after the other, since a rank takes seconds to start: its clock is written to a
folder for each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from tasks.training.strategies.base import Batch, Communicator
from tasks.training.strategies.build import build_strategy, join
from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.horovod_communicator import HorovodCommunicator
from tasks.training.telemetry.profiler import StepProfiler, profiler_variables
from tasks.training.telemetry.step_clock import StepClock

NUM_STEPS = 12
ROWS = 16
READING_S = 0.1
LARGE_WIDTH = 1000
LINK_S = 0.2
SLOW_READER, LARGE, STARVED = "slow-reader", "large", "starved"
CPU = torch.device("cpu")


def train(
    folder: Path,
    exchange: Communicator,
    width: int,
    depth: int,
    num_rows: int = ROWS,
    reading_s: float = 0,
) -> None:
    """Train a network of `depth` square layers; the large one under the profiler."""
    network = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
    strategy = build_strategy(StrategyConfig(), exchange, network, row_losses, sgd, CPU)
    rows = torch.rand(num_rows, width)
    profiled = folder.name == LARGE
    with (
        StepClock(folder, exchange.rank) as clock,
        StepProfiler(folder, exchange.rank, 3, with_timeline=True)
        if profiled
        else nullcontext() as profiler,
    ):
        strategy.phase = lambda _: clock.phase("exchange")
        for _ in range(NUM_STEPS):
            with clock.phase("data"):
                time.sleep(reading_s)
                batch = Batch((rows,), torch.zeros(num_rows))
            sent = strategy.wire_bytes
            with clock.phase("compute"):
                strategy.train_step(batch, num_rows * exchange.size, 0.01)
            clock.add_rows(num_rows)
            clock.add_bytes(strategy.wire_bytes - sent)
            clock.step()
            if profiler is not None:
                profiler.step()


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


@contextmanager
def sharing_a_core(rank: int) -> Iterator[None]:
    """Rank 1 shares its core with a busy process that comes first; the others have their own."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1] if rank == 1 else cores[0]})
    if rank != 1:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        os.nice(7)
        try:
            yield
        finally:
            busy.kill()


def main(folder: Path) -> None:
    os.environ |= profiler_variables("horovod")
    torch.set_num_threads(1)
    exchange = join(StrategyConfig(), "cpu")
    for name in (SLOW_READER, LARGE, STARVED):
        (folder / name).mkdir(exist_ok=True)
    train(folder / SLOW_READER, exchange, width=8, depth=1, reading_s=READING_S)
    train(folder / LARGE, SlowLink(), width=LARGE_WIDTH, depth=2)
    with sharing_a_core(exchange.rank):
        train(folder / STARVED, exchange, width=128, depth=60, num_rows=256)
    exchange.shut_down()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
