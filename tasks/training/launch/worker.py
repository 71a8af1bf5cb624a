"""Entry of one rank: `python -m tasks.training.launch.worker RUN_DIRECTORY`.

The launcher starts one for each rank, `ElasticDriver` one for each slot. It reads `job.json`,
trains, and reports errors.
"""

import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from horovod.common.exceptions import HorovodInternalError

from tasks.kernel.cores import SYSFS, cores_of_node, node_of_pci_device, physical_cores_by_node
from tasks.kernel.errors import ConfigurationError, StorageError
from tasks.training.checkpoints.store import open_store
from tasks.training.checkpoints.writer import CheckpointWriter
from tasks.training.core import run_directory
from tasks.training.core.train import TrainingSession
from tasks.training.elastic.link import end_process
from tasks.training.elastic.rank import run_elastic
from tasks.training.strategies.base import Communicator
from tasks.training.strategies.communicators import join

LOGGER = logging.getLogger(__name__)
# Gloo's errors come as plain RuntimeErrors that begin with the place in its source.


def main(arguments: list[str]) -> None:
    """Train in the run directory that `arguments` names: as one of a fixed group, or elastically.

    An elastic rank may join hours after the start, and may be another number in each group.
    """
    run = run_directory.RunDirectory(Path(arguments[0]))
    job = run.read_job()
    if job.config.elastic.enabled:
        log_lines(sys.stderr)  # stdout is the driver's
        train_elastically(run, job)
    else:
        log_lines(sys.stdout)
        rank = int(os.environ["HOROVOD_RANK"])  # torch.distributed's is the same
        with errors_reported(run, rank):
            train(run, job, rank)


def log_lines(stream: TextIO) -> None:
    """Write log lines as the driver reads them, see `launch.monitor.RankLog`."""
    logging.basicConfig(
        stream=stream, level=logging.INFO, format="%(levelname)s %(message)s", force=True
    )
    logging.getLogger("tasks").setLevel(logging.DEBUG)  # details go into training.log alone


@contextmanager
def errors_reported(run: run_directory.RunDirectory, rank: int) -> Iterator[None]:
    """Write any error into the run directory and end the process at once with code 1.

    At once: an orderly shutdown would wait for the other ranks.
    """
    try:
        yield
    except Exception as exc:
        traceback.print_exc()
        error = run_directory.RankError(
            rank=rank,
            kind=type(exc).__name__,
            message=str(exc),
            traceback=traceback.format_exc(),
            secondary=is_loss_of_another_rank(exc),
            time_s=time.time(),
        )
        code = 1
        try:
            run.write_error(error)
        except StorageError:
            code = run_directory.EXIT_REPORT_REFUSED
        end_process(code)


def is_loss_of_another_rank(error: BaseException) -> bool:
    """True where a collective broke because another rank has gone, so that the cause is there."""
    if isinstance(error, HorovodInternalError | dist.DistError):
        return True
    return type(error) is RuntimeError and "/gloo/" in str(error)


def train(run: run_directory.RunDirectory, job: run_directory.TrainingJob, rank: int) -> None:
    """One rank's whole part in a fixed group; every rank calls it.

    Raises:
        ConfigurationError: the device that is asked for is not there.
        DataContractError: the snapshot is not what was promised.
        TrainingError: training went wrong in a way that will repeat.
        StorageError: the disk refused a write.
    """
    torch.set_num_threads(job.threads_per_rank)
    ranks = join(job.config.strategy, job.config.device)
    allowed = os.sched_getaffinity(0)
    prepare_device(job, ranks, allowed)
    busy = ranks.local_size * job.threads_per_rank
    in_background = job.config.device == "cuda" or len(allowed) > busy  # a core is free
    with (
        writer_of(job, run, asynchronous=in_background) as writer,
        closing(TrainingSession(job, run, writer)) as session,
    ):
        session.rejoin(ranks)
        session.run(lambda: None)
    ranks.shut_down()


def train_elastically(run: run_directory.RunDirectory, job: run_directory.TrainingJob) -> None:
    """Be whichever rank the driver names, in one group after the other; does not return."""
    allowed = os.sched_getaffinity(0)

    def meet() -> Communicator:
        ranks = join(job.config.strategy, job.config.device)
        prepare_device(job, ranks, allowed)
        return ranks

    def session() -> TrainingSession:
        torch.set_num_threads(job.threads_per_rank)
        return TrainingSession(job, run, writer_of(job, run))

    run_elastic(session, job.config.elastic, meet)


def writer_of(
    job: run_directory.TrainingJob, run: run_directory.RunDirectory, *, asynchronous: bool = False
) -> CheckpointWriter:
    """What writes the checkpoints of a run where its configuration says, and as often."""
    store = open_store(job.config.checkpoints, run.path, run.location)
    return CheckpointWriter(store, job.config.checkpoints.every_s, asynchronous=asynchronous)


def prepare_device(job: run_directory.TrainingJob, ranks: Communicator, allowed: set[int]) -> None:
    """Pin the rank to its cores, or to its GPU and the cores near that.

    Args:
        job: what it does.
        ranks: says which rank of this host it is.
        allowed: cores that the process had before it was pinned.

    Raises:
        ConfigurationError: `cuda` is asked for where there is none, or too few for NCCL.
    """
    if job.config.device == "cpu":
        nodes = list(physical_cores_by_node(allowed).values())
        cores = cores_of_rank(nodes, ranks.local_rank, ranks.local_size, job.threads_per_rank)
        os.sched_setaffinity(0, cores or allowed)
        return
    num_devices = torch.cuda.device_count()
    if num_devices == 0 or (
        torch.distributed.is_nccl_available() and num_devices < ranks.local_size
    ):
        raise ConfigurationError(
            f"device='cuda' is asked for {ranks.local_size} rank(s), but this machine shows "
            f"{num_devices} CUDA device(s); set device='cpu' or run where there is one for each"
        )
    if ranks.rank == 0 and num_devices > ranks.local_size:
        LOGGER.warning(
            "%d of %d GPUs stay idle. Set launch.ranks for one rank a GPU; another number of ranks "
            "makes another model",
            num_devices - ranks.local_size,
            num_devices,
        )
    device = ranks.local_rank % num_devices
    torch.cuda.set_device(device)
    os.sched_setaffinity(0, cores_near_gpu(bus_address(device), allowed) or allowed)


def cores_of_rank(
    nodes: Sequence[Sequence[Sequence[int]]], local_rank: int, local_size: int, threads: int
) -> frozenset[int] | None:
    """Cores for one rank of this host; None where the system's scheduler does better.

    Ranks that take most of the host's physical cores get `threads` cores each, no core twice: a
    quarter faster, because they do not chase each other. With fewer, or more than there are,
    pinning would keep them from free cores. Physical cores are shared only when all are taken, and
    no rank spans two memory nodes where that can be avoided.

    Args:
        nodes: for each memory node, its physical cores, each as the one or more cores that share
            it: `kernel.cores.physical_cores_by_node` in order.
        local_rank: number of the rank on this host.
        local_size: ranks on this host.
        threads: of each rank.
    """
    needed, num_physical = local_size * threads, sum(map(len, nodes))
    number = sum(len(shared) for node in nodes for shared in node)
    if not num_physical // 2 < needed <= number:
        return None
    each = slice(0, 1) if needed <= num_physical else slice(None)
    free = [[core for shared in node for core in shared[each]] for node in nodes]
    return _shares(free, local_size, threads)[local_rank]


def _shares(free: list[list[int]], local_size: int, threads: int) -> Sequence[frozenset[int]]:
    """Cut the nodes' cores into equal shares; `free` is used up."""
    shares: list[frozenset[int]] = []
    for _ in range(local_size):
        roomiest = max(free, key=len)  # so ranks, and their traffic, spread over the nodes
        if len(roomiest) < threads:  # then what is left of all of them
            roomiest = [core for node in free for core in node]
            free = [roomiest]
        shares.append(frozenset(roomiest[:threads]))
        del roomiest[:threads]
    return shares


def cores_near_gpu(
    pci_bus_id: str, allowed: AbstractSet[int], sysfs: Path = SYSFS
) -> frozenset[int] | None:
    """The allowed cores of the GPU's memory node; None where there is no such node or core.

    Args:
        pci_bus_id: such as `0000:3B:00.0`, from NVML or PyTorch.
        allowed: cores that may be used.
        sysfs: where Linux shows hardware.
    """
    node = node_of_pci_device(pci_bus_id, sysfs)
    return None if node is None else frozenset(cores_of_node(node, sysfs) & allowed) or None


def bus_address(device: int) -> str:
    """Where a GPU is on the PCI bus, as `/sys` names it, such as `0000:af:00.0`."""
    found: Any = torch.cuda.get_device_properties(device)  # PyTorch's stubs lack these three
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


if __name__ == "__main__":
    main(sys.argv[1:])
