"""What this host has to offer a run: cores that it may use, GPUs, and cores for each rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pynvml  # type: ignore[import-untyped]

from tasks.kernel.cores import (
    SYSFS,
    core_limit,
    cores_of_node,
    node_of_pci_device,
    physical_cores_by_node,
)
from tasks.training.config import TrainingConfig

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Host:
    """This process's share of a host."""

    num_cores: int
    num_gpus: int

    @classmethod
    def of_this_process(cls) -> Self:
        """Look at this host."""
        allowed = len(os.sched_getaffinity(0))
        limit = core_limit().num_cores
        return cls(
            num_cores=allowed if limit is None else min(allowed, limit),
            num_gpus=count_gpus(os.environ),
        )


def count_gpus(environment: Mapping[str, str]) -> int:
    """GPUs that CUDA would show this process, without starting CUDA in it."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver or no GPU
        return 0
    try:
        present = int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(
        present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    )


def plan_ranks(config: TrainingConfig, host: Host) -> tuple[int, int]:
    """Ranks, and threads of each, for a run on this host.

    The ranks, and with them what is computed, follow from the configuration alone. Threads that it
    leaves open are the host's cores, divided: they change the last digits of a sum and no more.
    """
    ranks, given = config.num_ranks, config.launch.threads_per_rank
    threads = max(1, host.num_cores // ranks) if given == "auto" else given
    if config.device == "cuda" and ranks < host.num_gpus:
        LOGGER.warning(
            "%s: %d of %d GPUs stay idle. Set launch.ranks=%d for one rank a GPU; another number "
            "of ranks makes another model",
            in_words(ranks, threads),
            host.num_gpus - ranks,
            host.num_gpus,
            host.num_gpus,
        )
    return ranks, threads


def in_words(num_ranks: int, threads: int) -> str:
    """Such as `2 ranks x 1 thread`; recorded with the run."""
    ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
    return f"{ranks} x {threads} thread{'s' * (threads > 1)}"


@dataclass(frozen=True)
class Cores:
    """Cores that this process may use.

    Args:
        nodes: for each memory node that has some, its physical cores, each as the one or more cores
            that share it.
    """

    nodes: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def of_host(cls, allowed: AbstractSet[int], sysfs: Path = SYSFS) -> Cores:
        """The cores among `allowed` (`os.sched_getaffinity(0)`) as `sysfs` describes them."""
        return cls(tuple(physical_cores_by_node(allowed, sysfs).values()))

    @property
    def num_physical(self) -> int:
        """Physical cores of all nodes."""
        return sum(map(len, self.nodes))

    @property
    def number(self) -> int:
        """Cores of all nodes."""
        return sum(len(shared) for node in self.nodes for shared in node)

    def of_rank(self, local_rank: int, local_size: int, threads: int) -> frozenset[int] | None:
        """Cores for one rank of this host; None where the system's scheduler does better.

        Ranks that take most of the host's physical cores get `threads` cores each, no core twice: a
        quarter faster, because they do not chase each other. With fewer, or more than there are,
        pinning would keep them from free cores. Physical cores are shared only when all are taken,
        and no rank spans two memory nodes where that can be avoided.
        """
        needed = local_size * threads
        if not self.num_physical // 2 < needed <= self.number:
            return None
        each = slice(0, 1) if needed <= self.num_physical else slice(None)
        free = [[core for shared in node for core in shared[each]] for node in self.nodes]
        return _shares(free, local_size, threads)[local_rank]


def _shares(free: list[list[int]], local_size: int, threads: int) -> Sequence[frozenset[int]]:
    """Cut the nodes' cores into equal shares; `free` is used up."""
    shares: list[frozenset[int]] = []
    while len(shares) < local_size:
        roomiest = max(free, key=len)  # so ranks, and their traffic, spread over the nodes
        if len(roomiest) < threads:
            break
        shares.append(frozenset(roomiest[:threads]))
        del roomiest[:threads]
    rest = [core for node in free for core in node]
    while len(shares) < local_size:
        shares.append(frozenset(rest[:threads]))
        del rest[:threads]
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
