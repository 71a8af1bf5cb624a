"""Entry of one rank of an elastic run: `python -m tasks.training.elastic.worker RUN_DIRECTORY`.

`ElasticDriver` starts one for each slot. The rank may join hours after the start, and may be
another number in each group.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tasks.training.checkpoints.store import open_store
from tasks.training.checkpoints.writer import CheckpointWriter
from tasks.training.core.run_directory import RunDirectory, TrainingJob
from tasks.training.core.train import TrainingSession
from tasks.training.elastic.rank import run_elastic
from tasks.training.launch.worker import prepare_device, speak_by_log
from tasks.training.strategies.base import Communicator
from tasks.training.strategies.build import join


def main(arguments: list[str]) -> None:
    """Train as whichever rank the driver says, in the run directory that `arguments` names."""
    speak_by_log(sys.stderr)  # stdout is the driver's
    run = RunDirectory(Path(arguments[0]))
    job = run.read_job()
    allowed = os.sched_getaffinity(0)

    def meet() -> Communicator:
        exchange = join(job.config.strategy, job.config.device)
        prepare_device(job, exchange, allowed)
        return exchange

    run_elastic(lambda: _session(run, job), job.config.elastic, meet)


def _session(run: RunDirectory, job: TrainingJob) -> TrainingSession:
    torch.set_num_threads(job.threads_per_rank)
    store = open_store(job.config.checkpoints, run.path)
    return TrainingSession(job, run, store, CheckpointWriter(store, job.config.checkpoints))


if __name__ == "__main__":
    main(sys.argv[1:])
