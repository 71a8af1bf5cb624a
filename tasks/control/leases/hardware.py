"""What this host has to lease, as this process may use it, and the hardware classes it serves."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from tasks.control.leases.cores import CoreLimit, CoreSet, core_limit, core_sets
from tasks.control.leases.nvidia import Gpu, Unusable, find_gpus

LOGGER = logging.getLogger(__name__)
CPU = "cpu"
GPU = "gpu"


class HostDevices(BaseModel):
    """Devices of a host that one process may use."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    core_sets: tuple[CoreSet, ...] = Field(description="CPU cores by memory node.")
    core_limit: CoreLimit = Field(
        default=CoreLimit(), description="How many of them its container may keep busy."
    )
    gpus: tuple[Gpu, ...] = Field(default=(), description="GPUs, and slices of GPUs.")
    unusable: tuple[Unusable, ...] = Field(
        default=(), description="Devices that are there and cannot be used, and why."
    )

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Look at this host: affinity, control groups, NVML.

        Raises:
            ConfigurationError: `CUDA_VISIBLE_DEVICES` cannot be understood.
        """
        found = find_gpus(os.environ if environment is None else environment)
        return cls(
            core_sets=core_sets(os.sched_getaffinity(0)),
            core_limit=core_limit(),
            gpus=found.usable,
            unusable=found.unusable,
        )

    @property
    def num_cores(self) -> int:
        """Cores that can be kept busy at a time."""
        present = sum(len(each.cores) for each in self.core_sets)
        limit = self.core_limit.num_cores
        return present if limit is None else min(present, limit)

    @property
    def classes(self) -> tuple[str, ...]:
        """Hardware classes: `cpu` always, `gpu` where there is one that can be used."""
        return (CPU, GPU) if self.gpus else (CPU,)


def hardware_classes(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Hardware classes of this host, for which it can run workers: `cpu`, and `gpu` (NVIDIA).

    A GPU that is there and cannot be used gives no class; the log says which and why.

    Raises:
        ConfigurationError: `CUDA_VISIBLE_DEVICES` cannot be understood.
    """
    devices = HostDevices.of_this_process(environment)
    for each in devices.unusable:
        LOGGER.warning("%s", each)
    return devices.classes
