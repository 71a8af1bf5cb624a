"""A rank of the probe: takes real steps on synthetic rows, when it is its turn.

Runs in a folder that holds `probe.json`. The driver asks for turn n by a file `turn-n` that holds
its number of steps, and for the end by a turn of no steps. Rank 0 prints `PROBE <seconds>` after
each turn.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tasks.training.data.preprocess import Preprocessing
from tasks.training.launch.pinning import Cores
from tasks.training.launch.probe_job import JOB_FILE, SAYS, TURN_FILE, ProbeJob
from tasks.training.networks import build_network
from tasks.training.schedule import adamw
from tasks.training.strategies.base import Batch, Exchange, Strategy
from tasks.training.strategies.build import build_strategy, join

POLL_S = 0.002


def main(arguments: list[str]) -> None:
    """Be one rank of the candidate whose folder `arguments` names."""
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING, force=True)
    folder = Path(arguments[0])
    job = ProbeJob.model_validate_json((folder / JOB_FILE).read_text())
    threads = int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    exchange = join(job.strategy, "cpu")
    cores = Cores.of_host(os.sched_getaffinity(0))
    if own := cores.of_rank(exchange.local_rank, exchange.local_size, threads):
        os.sched_setaffinity(0, own)
    torch.manual_seed(job.training.seed)
    strategy = build_strategy(
        job.strategy,
        exchange,
        build_network(_preprocessing(job), job.training),
        _row_losses,
        lambda parameters: adamw(parameters, job.training),
        torch.device("cpu"),
    )
    Turns(folder, job, strategy, exchange).serve()
    exchange.shut_down()


class Turns:
    """Steps when asked for. All ranks go along; rank 0 listens and speaks."""

    def __init__(self, folder: Path, job: ProbeJob, strategy: Strategy, exchange: Exchange) -> None:
        self._folder = folder
        self._job = job
        self._strategy = strategy
        self._exchange = exchange
        self._batch = _batch(job, strategy)

    def serve(self) -> None:
        """Take turns until one of no steps is asked for."""
        turn = 0
        while num_steps := self._exchange.from_rank_0(self._asked_for(turn)):
            self._take(num_steps)
            turn += 1

    def _asked_for(self, turn: int) -> int:
        """Rank 0: wait for the driver; returns the steps of the next turn."""
        if self._exchange.rank != 0:
            return 0
        file = self._folder / TURN_FILE.format(turn)
        while not file.exists():
            time.sleep(POLL_S)
        return int(file.read_text())

    def _take(self, num_steps: int) -> None:
        started = time.perf_counter()
        for _ in range(num_steps):
            self._strategy.train_step(
                self._batch, self._job.rows_per_step, self._job.training.learning_rate
            )
        if self._exchange.rank == 0:
            sys.stdout.write(f"{SAYS}{time.perf_counter() - started}\n")
            sys.stdout.flush()


def _preprocessing(job: ProbeJob) -> Preprocessing:
    edges = np.linspace(0, 1, job.training.num_bins + 1, dtype=np.float32)
    return Preprocessing(
        vocabularies=tuple(np.arange(size, dtype=np.int32) for size in job.category_sizes),
        edges=(edges,) * job.num_numbers,
        flagged=tuple(range(job.num_numbers)),
    )


def _batch(job: ProbeJob, strategy: Strategy) -> Batch:
    """This rank's rows of one global batch, drawn evenly; the first ranks have one row more."""
    whole, more = divmod(job.rows_per_step, strategy.data_size)
    num_rows = whole + (strategy.data_rank < more)
    sizes = torch.tensor(job.category_sizes, dtype=torch.float32)
    positions = (torch.rand(num_rows, len(job.category_sizes)) * sizes).long()
    numbers = torch.rand(num_rows, job.num_numbers)
    return Batch((positions, numbers), torch.randint(0, 2, (num_rows,)).float())


def _row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")


if __name__ == "__main__":
    main(sys.argv[1:])
