"""Entry of one Horovod rank: `python -m tasks.training.worker RUN_DIRECTORY`.

The launcher starts one for each rank. It reads `job.json`, trains, and reports errors by file.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from horovod.common.exceptions import HorovodInternalError

from tasks.errors import ConfigurationError, StorageError
from tasks.training.config import TrainingConfig
from tasks.training.data.fitting import check_labels, check_shards, fit_on_all_ranks
from tasks.training.data.shards import ShardReader, ShardRows
from tasks.training.loop import TrainingLoop
from tasks.training.model import TabularNetwork
from tasks.training.run_directory import (
    EXIT_REPORT_REFUSED,
    ProgressReporter,
    RankError,
    RunDirectory,
    TrainingJob,
)
from tasks.training.strategies.horovod_exchange import HorovodExchange

LOGGER = logging.getLogger(__name__)


def main(arguments: list[str]) -> None:
    """Train as the rank that the environment names, in the run directory that `arguments` names."""
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(message)s", force=True
    )
    logging.getLogger("tasks").setLevel(logging.DEBUG)  # details go into training.log alone
    run = RunDirectory(Path(arguments[0]))
    rank = int(os.environ["HOROVOD_RANK"])
    with errors_reported(run, rank):
        train(run, rank)


@contextmanager
def errors_reported(run: RunDirectory, rank: int) -> Iterator[None]:
    """Write any error into the run directory and end the process at once with code 1.

    At once: an orderly shutdown would wait for the other ranks.
    """
    try:
        yield
    except Exception as exc:
        traceback.print_exc()
        error = RankError(
            rank=rank,
            kind=type(exc).__name__,
            message=str(exc),
            traceback=traceback.format_exc(),
            secondary=isinstance(exc, HorovodInternalError),
            time_s=time.time(),
        )
        code = 1
        try:
            run.write_error(error)
        except StorageError:
            code = EXIT_REPORT_REFUSED
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def train(run: RunDirectory, rank: int) -> None:
    """One rank's whole part; every rank calls it.

    Raises:
        ConfigurationError: the device that is asked for is not there.
        DataContractError: the snapshot is not what was promised.
        TrainingError: training went wrong in a way that will repeat.
        StorageError: the disk refused a write.
    """
    progress = ProgressReporter(run, rank)
    job = run.read_job()
    config = job.config
    torch.set_num_threads(config.threads_per_rank)
    progress.enter("meeting the other ranks")
    exchange = HorovodExchange()
    prepare_device(config, exchange)
    progress.enter("reading rows")
    training, validation = _read(job, exchange, progress)
    progress.enter("fitting the preprocessing")
    preprocessing = fit_on_all_ranks(job, training, exchange)
    torch.manual_seed(config.seed)
    network = TabularNetwork(preprocessing, config)
    exchange.broadcast_parameters(network)
    progress.enter("building the optimizer")
    TrainingLoop(
        network, preprocessing, training, validation, config, exchange, run, progress
    ).run()
    LOGGER.info("done; peak memory %d MB", _peak_memory_mb())
    exchange.shut_down()


def _read(
    job: TrainingJob, exchange: HorovodExchange, progress: ProgressReporter
) -> tuple[ShardRows, ShardRows]:
    """This rank's training and validation rows. Collective."""
    splits, num_shards = job.splits, job.config.num_shards
    reader = ShardReader(
        job.snapshot_path, job.columns, num_shards, exchange.rank, exchange.size, progress.step
    )
    training = reader.read(splits.train)
    validation = reader.read(splits.validation)
    total = check_labels("training", training, splits.train, exchange)
    check_labels("validation", validation, splits.validation, exchange)
    check_shards(training, splits.train, num_shards)
    LOGGER.info("holds %d of %d training rows", training.num_rows, total)
    return training, validation


def prepare_device(config: TrainingConfig, exchange: HorovodExchange) -> None:
    """Pin the rank to its cores, or to its GPU.

    Raises:
        ConfigurationError: `cuda` is asked for where there is none, or too few for NCCL.
    """
    if config.device == "cpu":
        pin_to_cores(exchange.local_rank, exchange.local_size, config.threads_per_rank)
        return
    num_devices = torch.cuda.device_count()
    if num_devices == 0 or (exchange.exchanges_on_gpu and num_devices < exchange.local_size):
        raise ConfigurationError(
            f"device='cuda' is asked for {exchange.local_size} rank(s), but this machine shows "
            f"{num_devices} CUDA device(s); set device='cpu' or run where there is one for each"
        )
    torch.cuda.set_device(exchange.local_rank % num_devices)


def pin_to_cores(local_rank: int, local_size: int, threads: int) -> None:
    """Give each rank cores of its own where the ranks take most of the machine's.

    A quarter faster there (the ranks do not chase each other); on a larger machine, with other work
    beside this, the scheduler does better.
    """
    cores = sorted(os.sched_getaffinity(0))
    needed = local_size * threads
    if len(cores) // 2 < needed <= len(cores):
        os.sched_setaffinity(0, cores[local_rank * threads : (local_rank + 1) * threads])


def _peak_memory_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    main(sys.argv[1:])
