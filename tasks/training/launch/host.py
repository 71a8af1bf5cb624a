"""What this host has to offer a run: cores that it may use, and cores for each rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from tasks.kernel.cores import (
    SYSFS,
    core_limit,
    cores_of_node,
    node_of_pci_device,
)
from tasks.training.config import TrainingConfig


def num_usable_cores() -> int:
    """Cores of this host that this process may keep busy."""
    allowed = len(os.sched_getaffinity(0))
    return min(allowed, core_limit().num_cores or allowed)


def plan_ranks(config: TrainingConfig, num_cores: int) -> tuple[int, int]:
    """Ranks, and threads of each, for a run on a host with so many cores.

    The ranks, and with them what is computed, follow from the configuration alone. Threads that it
    leaves open are the host's cores, divided: they change the last digits of a sum and no more.
    """
    ranks, given = config.num_ranks, config.launch.threads_per_rank
    return ranks, max(1, num_cores // ranks) if given == "auto" else given


def in_words(num_ranks: int, threads: int) -> str:
    """Such as `2 ranks x 1 thread`; recorded with the run."""
    ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
    return f"{ranks} x {threads} thread{'s' * (threads > 1)}"


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
