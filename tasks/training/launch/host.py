"""What this host has to offer a run: cores that it may really use, and GPUs."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pynvml  # type: ignore[import-untyped]

CGROUP = Path("/sys/fs/cgroup")
CPU_INFO = Path("/proc/cpuinfo")
CPU_TIMES = Path("/proc/stat")
IDLE_FIELDS = slice(3, 5)  # idle, and waiting for a disk
ALL_FIELDS = slice(0, 8)  # without guests, which are counted as users already


@dataclass(frozen=True)
class Host:
    """This process's share of a host."""

    cpu: str
    num_cores: int
    num_gpus: int

    @classmethod
    def of_this_process(cls) -> Self:
        """Look at this host."""
        allowed = len(os.sched_getaffinity(0))
        quota = cpu_quota(CGROUP)
        return cls(
            cpu=cpu_model(CPU_INFO),
            num_cores=allowed if quota is None else min(allowed, max(1, math.ceil(quota))),
            num_gpus=count_gpus(os.environ),
        )


def cpu_quota(cgroup: Path) -> float | None:
    """Cores' worth of time that a container gets; None where there is no limit (cgroup v2)."""
    try:
        allowed, period = (cgroup / "cpu.max").read_text().split()
    except OSError:
        return None
    return None if allowed == "max" else int(allowed) / int(period)


def cpu_model(cpu_info: Path) -> str:
    """Name of the processor, or its architecture where Linux does not tell the name."""
    for line in cpu_info.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def busy_share(seconds: float, cpu_times: Path = CPU_TIMES) -> float:
    """Share of all cores' time that is taken while this process sleeps for a moment."""
    before = _times(cpu_times)
    time.sleep(seconds)
    spent = [after - earlier for earlier, after in zip(before, _times(cpu_times), strict=True)]
    total = sum(spent[ALL_FIELDS])
    return 1 - sum(spent[IDLE_FIELDS]) / total if total else 0.0


def _times(cpu_times: Path) -> list[int]:
    return [int(field) for field in cpu_times.read_text().splitlines()[0].split()[1:]]


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
