"""CPU cores of this host: by memory node, as Linux shows them, and how many may be kept busy.

Facts come from `/sys` and `/proc`. Where they show nothing, a host is one memory node of cores that
share nothing.
"""

import math
import os
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

from pydantic import Field

from tasks.kernel.values import Contract

SYSFS = Path("/sys")
PROCFS = Path("/proc")


class CoreLimit(Contract):
    """How many cores a control group may keep busy at a time, whichever they are."""

    num_cores: int | None = Field(default=None, ge=1, description="Cores; none: no limit.")
    group: str = Field(default="", description="The control group that is limited.")


def physical_cores_by_node(
    allowed: AbstractSet[int], sysfs: Path = SYSFS
) -> dict[int, tuple[tuple[int, ...], ...]]:
    """The cores among `allowed` (`os.sched_getaffinity(0)`), by number of the memory node (NUMA).

    Each physical core is given as the one or more cores that share it (SMT).
    """
    left = set(allowed)
    found: dict[int, tuple[tuple[int, ...], ...]] = {}
    for path in sorted(sysfs.glob("devices/system/node/node[0-9]*"), key=_number):
        listed = left & cores_of_node(_number(path), sysfs)
        left -= listed
        if listed:
            found[_number(path)] = _physical_cores(listed, sysfs)
    if left:
        found[max(found, default=-1) + 1] = _physical_cores(left, sysfs)
    return found


def cores_of_node(node: int, sysfs: Path = SYSFS) -> set[int]:
    """All cores of a memory node."""
    return parse_cpu_list(text_of(sysfs / f"devices/system/node/node{node}/cpulist"))


def core_limit(procfs: Path = PROCFS, sysfs: Path = SYSFS) -> CoreLimit:
    """The tightest processor limit of the control groups that this process is in (v1 and v2).

    A share of a core counts as a whole one: time that is left over cannot be leased.
    """
    limits = _limits(procfs / "self" / "cgroup", sysfs / "fs" / "cgroup")
    if (tightest := min(limits, key=itemgetter(0), default=None)) is None:
        return CoreLimit()
    # Two containers may both call their group "/"; the namespace tells them apart.
    space = _link(procfs / "self" / "ns" / "cgroup")
    return CoreLimit(num_cores=tightest[0], group=f"{space}{tightest[1]}")


def usable_cores() -> int:
    """Cores that this process may use: its affinity, or less where its control group says so."""
    allowed = len(os.sched_getaffinity(0))
    return min(allowed, core_limit().num_cores or allowed)


def _limits(listing: Path, mounts: Path) -> Iterator[tuple[int, str]]:
    """Cores, and the control group of this process that limits it so, the innermost group first."""
    for line in text_of(listing).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = mounts / controllers if controllers else mounts
        inner = Path(path.lstrip("/"))
        for group in (inner, *inner.parents):
            quota = _quota(mount / group, is_v1=bool(controllers))
            if quota is not None:
                name = group if group != Path() else ""
                yield max(1, math.ceil(quota)), f"{controllers}:/{name}"


def _quota(folder: Path, *, is_v1: bool) -> float | None:
    quota, _, period = text_of(folder / "cpu.max").partition(" ")
    if is_v1:
        quota, period = text_of(folder / "cpu.cfs_quota_us"), text_of(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if period and quota.isdecimal() else None


def parse_cpu_list(text: str) -> set[int]:
    """Cores that a list such as `0-3,8,10-11` names."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def node_of_pci_device(bus_id: str, sysfs: Path = SYSFS) -> int | None:
    """Memory node that a device such as `00000000:3B:00.0` hangs on; None where nobody knows."""
    domain, _, rest = bus_id.lower().partition(":")
    text = text_of(sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node")
    return int(text) if text.isdecimal() else None


def _physical_cores(cores: AbstractSet[int], sysfs: Path) -> tuple[tuple[int, ...], ...]:
    physical: dict[tuple[int, ...], None] = {}
    for core in sorted(cores):
        path = sysfs / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        physical[tuple(sorted((parse_cpu_list(text_of(path)) | {core}) & cores))] = None
    return tuple(physical)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("node"))


def text_of(path: Path) -> str:
    """What a file shows; nothing where it is absent or this process may not read it."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _link(path: Path) -> str:
    with suppress(OSError):
        return os.readlink(path)
    return ""
