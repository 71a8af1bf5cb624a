"""One rank of `infra.bench.training.reading`, which names the run directory."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from torch.nn import functional

from tasks.training.core.network import TabularNetwork
from tasks.training.core.run_directory import RunDirectory, TrainingJob
from tasks.training.core.schedule import adamw
from tasks.training.data.opening import open_sources
from tasks.training.data.source import Sources
from tasks.training.strategies.base import Batch
from tasks.training.strategies.horovod_communicator import HorovodCommunicator

# Four pools of each shard and a little: reading them is paid for in full.
STEPS = 512
WARM_UP_STEPS = 20


class Trainer:
    """Forward, backward, one flat exchange of gradients and AdamW: a step of training."""

    def __init__(self, job: TrainingJob, sources: Sources, exchange: HorovodCommunicator) -> None:
        torch.manual_seed(job.config.seed)
        self._exchange = exchange
        self._network = TabularNetwork(sources.preprocessing, job.config)
        self._optimizer = adamw(self._network.named_parameters(), job.config)
        parameters = list(self._network.parameters())
        self._flat = torch.zeros(sum(p.numel() for p in parameters))
        begin = 0
        for parameter in parameters:
            end = begin + parameter.numel()
            parameter.grad = self._flat[begin:end].view_as(parameter)
            begin = end
        self._global_rows = sources.plan.rows_per_shard * job.config.num_shards

    def step(self, batch: Batch) -> None:
        """One optimizer step on this rank's rows of a batch."""
        self._flat.zero_()
        logits = self._network(*batch.inputs)
        losses = functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")
        (losses / self._global_rows).backward()  # type: ignore[no-untyped-call]
        self._exchange.sum_(self._flat)
        self._optimizer.step()


@dataclass
class Spent:
    """What the steps of one kind of reading took on this rank."""

    opened_s: float
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def add_step(self, trainer: Trainer, batches: Iterator[Batch]) -> None:
        """Take a batch, train on it, and count the seconds of both."""
        started, cpu_before = time.monotonic(), time.process_time()
        trainer.step(next(batches))
        self.wall_s += time.monotonic() - started
        self.cpu_s += time.process_time() - cpu_before


def main(run_path: Path) -> None:
    """Measure what the file `what` of the run directory says."""
    job = RunDirectory(run_path).read_job()
    torch.set_num_threads(1)
    exchange = HorovodCommunicator()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[exchange.local_rank % len(cores)]})
    what, steps = (run_path / "what").read_text().split()
    measure = measure_speed if what == "speed" else measure_memory
    measured = measure(job, exchange, run_path / "rows", int(steps))
    (run_path / f"measured-{exchange.rank}.json").write_text(json.dumps(measured))
    exchange.shut_down()


def opened(job: TrainingJob, exchange: HorovodCommunicator, folder: Path, mode: str) -> Sources:
    """The rank's rows in the given mode."""
    reading = job.config.reading.model_copy(update={"mode": mode})
    changed = job.model_copy(update={"config": job.config.model_copy(update={"reading": reading})})
    return open_sources(
        changed, exchange, exchange.rank, exchange.size, folder, on_progress=lambda: None
    )


def measure_speed(
    job: TrainingJob, exchange: HorovodCommunicator, folder: Path, steps: int
) -> dict[str, dict[str, float]]:
    """Both kinds of reading in turn, step by step, on the same network.

    Steps of a few milliseconds alternate, so whatever else the machine does hits both alike. All
    that reading costs falls into the steps: on a CPU rank it has no thread of its own.
    """
    batches: dict[str, Iterator[Batch]] = {}
    spent: dict[str, Spent] = {}
    for mode in ("stream", "memory"):
        started = time.monotonic()
        sources = opened(job, exchange, folder, mode)
        spent[mode] = Spent(opened_s=time.monotonic() - started)
        batches[mode] = sources.training.batches(0)
    trainer = Trainer(job, sources, exchange)
    for batch in islice(sources.training.batches(1), min(steps, WARM_UP_STEPS)):
        trainer.step(batch)
    for number in range(steps):
        for mode in ("memory", "stream") if number % 2 else ("stream", "memory"):
            spent[mode].add_step(trainer, batches[mode])
    return {mode: asdict(of_mode) for mode, of_mode in spent.items()}


def measure_memory(
    job: TrainingJob, exchange: HorovodCommunicator, folder: Path, steps: int
) -> dict[str, int]:
    """Peak memory of a rank that decodes, fits, trains and validates from files alone."""
    sources = opened(job, exchange, folder, "stream")
    trainer = Trainer(job, sources, exchange)
    anonymous = 0
    for number, batch in enumerate(islice(sources.training.batches(0), steps)):
        trainer.step(batch)
        if number % 8 == 0:
            anonymous = max(anonymous, _status_bytes("RssAnon"))
    for _ in sources.validation.blocks():
        anonymous = max(anonymous, _status_bytes("RssAnon"))
    files = folder.rglob("*.rows") if exchange.rank == 0 else ()
    return {
        "peak_bytes": _status_bytes("VmHWM"),
        "peak_anonymous_bytes": anonymous,
        "decoded_bytes": sum(file.stat().st_size for file in files),
    }


def _status_bytes(name: str) -> int:
    """A size from this process's `/proc/self/status`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
