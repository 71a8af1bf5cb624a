"""Cores for each rank of a host: of its own, near each other, and near its memory.

Facts come from `/sys`, as Linux shows them: memory nodes (NUMA), and cores that share one physical
core (SMT). Where it says nothing, a host is one node of cores that share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")


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
        left = set(allowed)
        nodes = []
        for path in sorted(sysfs.glob("devices/system/node/node[0-9]*"), key=_number):
            listed = left & parse_cpu_list(_text(path / "cpulist"))
            nodes.append(_physical_cores(listed, sysfs))
            left -= listed
        nodes.append(_physical_cores(left, sysfs))
        return cls(tuple(filter(None, nodes)))

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


def node_of_gpu(pci_bus_id: str, sysfs: Path = SYSFS) -> int | None:
    """Memory node that a GPU is attached to; None where the host has only one or does not say.

    Args:
        pci_bus_id: such as `0000:3B:00.0`, from NVML or PyTorch; a longer domain is shortened.
        sysfs: where to look.
    """
    domain, _, rest = pci_bus_id.lower().partition(":")
    text = _text(sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node")
    return int(text) if text.isdecimal() else None


def cores_near_gpu(
    pci_bus_id: str, allowed: AbstractSet[int], sysfs: Path = SYSFS
) -> frozenset[int] | None:
    """The allowed cores of the GPU's memory node; None where there is no such node or core."""
    node = node_of_gpu(pci_bus_id, sysfs)
    if node is None:
        return None
    listed = parse_cpu_list(_text(sysfs / f"devices/system/node/node{node}/cpulist"))
    return frozenset(listed & allowed) or None


def parse_cpu_list(text: str) -> set[int]:
    """Cores that a list such as `0-3,8,10-11` names."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def _physical_cores(cores: AbstractSet[int], sysfs: Path) -> tuple[tuple[int, ...], ...]:
    """Cores in increasing order, those that share a physical core together."""
    physical: dict[tuple[int, ...], None] = {}
    for core in sorted(cores):
        path = sysfs / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        sharing = (parse_cpu_list(_text(path)) | {core}) & cores
        physical[tuple(sorted(sharing))] = None
    return tuple(physical)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("node"))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
