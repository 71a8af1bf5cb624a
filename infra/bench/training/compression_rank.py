"""One rank of `infra.bench.training.compression`, which names the run directory.

Trains the same network in each way and from several seeds, all in one process and in turn.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tasks.training.config import TrainingConfig
from tasks.training.core.network import TabularNetwork
from tasks.training.core.objective import NUM_SCORE_BINS, histogram_auc, score_histograms
from tasks.training.core.run_directory import RunDirectory
from tasks.training.core.schedule import adamw, one_cycle_rate
from tasks.training.data.opening import open_sources
from tasks.training.data.source import RowSource, Sources
from tasks.training.strategies.base import Batch, Communicator
from tasks.training.strategies.build import build_strategy, join
from tasks.training.strategies.config import StrategyConfig
from tasks.training.strategies.data_parallel import Strategy

SEEDS = (0, 1, 2)
WAYS: dict[str, dict[str, object]] = {
    "fp32": {},
    "fp16": {"gradient_compression": "fp16"},
    "PowerSGD": {"gradient_compression": "powersgd"},
    "8 local steps": {"local_steps": 8},
    "8 steps, late mean": {"local_steps": 8, "asynchronous": True},
}
# Of this process's network namespace; /sys shows that of whoever mounted it.
INTERFACES = Path("/proc/self/net/dev")


@dataclass(frozen=True)
class Outcome:
    """One training: how good it became, and what its steps sent."""

    way: str
    seed: int
    auc: float
    steps: int
    counted_bytes: int
    """What the strategy says that this rank sent."""
    loopback_bytes: int
    """What went over the loopback interface, of both ranks, with all overhead."""
    seconds: float


class Bench:
    """The rank's rows, and trainings on them."""

    def __init__(self, config: TrainingConfig, sources: Sources, exchange: Communicator) -> None:
        self._config = config
        self._sources = sources
        self._exchange = exchange

    def run(self, way: str, seed: int) -> Outcome:
        """Train once, and judge on the validation rows."""
        torch.manual_seed(seed)
        network = TabularNetwork(self._sources.preprocessing, self._config)
        strategy = build_strategy(
            StrategyConfig.model_validate(WAYS[way]),
            self._exchange,
            network,
            partial(functional.binary_cross_entropy_with_logits, reduction="none"),
            lambda parameters: adamw(parameters, self._config),
            torch.device("cpu"),
        )
        self._exchange.sum(np.zeros(1))  # all ranks begin together
        sent, started = loopback_bytes(), time.monotonic()
        steps = self._train(strategy, seed)
        self._exchange.sum(np.zeros(1))
        sent, seconds = loopback_bytes() - sent, time.monotonic() - started
        counted = strategy.wire_bytes
        own = strategy.checksum()
        if any(of_rank != own for of_rank in self._exchange.gather_values(own)):
            raise RuntimeError(f"after training with {way} the ranks' weights differ")
        return Outcome(way, seed, self._auc(strategy), steps, counted, sent, seconds)

    def _train(self, strategy: Strategy, seed: int) -> int:
        plan, config = self._sources.plan, self._config
        num_steps = config.max_epochs * plan.num_steps
        global_rows = plan.rows_per_shard * config.num_shards
        for step, batch in enumerate(self._batches(self._sources.training, seed)):
            torch.manual_seed(1_000_003 * seed + 7_919 * self._exchange.rank + step)
            rate = one_cycle_rate(step, num_steps, config.learning_rate)
            strategy.train_step(batch, global_rows, rate)
        return num_steps

    def _batches(self, source: RowSource, seed: int) -> Iterator[Batch]:
        """The batches of all epochs; every seed has an order of its own."""
        for epoch in range(self._config.max_epochs):
            yield from source.batches(1000 * seed + epoch)

    def _auc(self, strategy: Strategy) -> float:
        totals = np.zeros(2 * NUM_SCORE_BINS)
        for batch in self._sources.validation.blocks():
            scores: Tensor = torch.sigmoid(strategy.evaluate(batch.inputs))
            totals += score_histograms(scores.numpy(), batch.labels.numpy()).ravel()
        return histogram_auc(self._exchange.sum(totals).reshape(2, -1))


def loopback_bytes() -> int:
    """Bytes that the loopback interface has carried so far."""
    line = next(line for line in INTERFACES.read_text().splitlines() if line.split()[0] == "lo:")
    return int(line.split()[1])


def main(run_path: Path) -> None:
    """Train in all ways, seed by seed; rank 0 writes what came out."""
    job = RunDirectory(run_path).read_job()
    torch.set_num_threads(1)
    exchange = join(StrategyConfig(), "cpu")
    sources = open_sources(
        job, exchange, exchange.rank, exchange.size, run_path / "rows", on_progress=lambda: None
    )
    bench = Bench(job.config, sources, exchange)
    outcomes = []
    for seed in SEEDS:
        for way in WAYS:
            outcomes.append(asdict(bench.run(way, seed)))
            if exchange.rank == 0:
                print(f"  {json.dumps(outcomes[-1])}", flush=True)
    if exchange.rank == 0:
        (run_path / "outcomes.json").write_text(json.dumps(outcomes))
    exchange.shut_down()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
