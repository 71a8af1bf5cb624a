"""What this host has to offer a run: cores that it may really use, and GPUs."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pynvml  # type: ignore[import-untyped]

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Host:
    """This process's share of a host."""

    num_cores: int
    num_gpus: int

    @classmethod
    def of_this_process(cls) -> Self:
        """Look at this host."""
        allowed = len(os.sched_getaffinity(0))
        quota = cpu_quota(CGROUP)
        return cls(
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
