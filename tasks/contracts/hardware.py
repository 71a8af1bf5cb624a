"""Hardware classes: kinds of machine, named by what they require.

They are data: `infra/work_pools/hardware.yaml` has those that are shipped, and says where others
stand. What a host has is found out by `tasks.control.leases.devices`.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, RootModel, model_validator

from tasks.contracts.base import Contract
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import read_yaml
from tasks.kernel.settings import PROJECT_ROOT, Settings
from tasks.kernel.values import Described, checked

CPU, GPU = "cpu", "gpu"
HARDWARE_CLASS = r"^(cpu|gpu)(-[a-z0-9.]+)*$"
NAME_IN_A_CLUSTER = re.compile(r"(?!.{51})[a-z]+(-[a-z0-9]+(\.[a-z0-9]+)*)*")
"""Kubernetes takes labels of 63 letters, and `falaj-worker-` stands before the class."""
FILE_VARIABLE = "FALAJ_HARDWARE"
FILE_NAME = "hardware.yaml"
ClassName = Annotated[str, Field(pattern=HARDWARE_CLASS)]
S_PER_HOUR, J_PER_KWH = 3600.0, 3.6e6
CLASS_VARIABLE = "FALAJ_HARDWARE_CLASS"
"""In a run's environment the hardware class of its pool: of its devices alone it sees any."""
SHIPPED = PROJECT_ROOT / "infra" / "work_pools" / FILE_NAME


def kind_of(hardware_class: str) -> str:
    """Kind of a class, the first word of its name: `cpu` or `gpu`."""
    return hardware_class.partition("-")[0]


class GpuNeeds(Described):
    """The GPUs, or slices of GPUs, that a class is about."""

    vendor: Literal["nvidia"] = "nvidia"
    model: str | None = Field(default=None, description="Part of the model's name, such as `H100`.")
    memory_gib: float = Field(default=0, ge=0, description="Least memory of each.")
    mig_profile: str | None = None
    """Slices of this profile: `1g.10gb`, or `1g` of any memory."""
    count: int = Field(default=1, ge=1, description="How many a host must have.")


class Needs(Contract):
    """What a host must have."""

    cpu_flags: tuple[str, ...] = Field(default=(), description="As /proc/cpuinfo names them.")
    cores: int = Field(default=1, ge=1, description="Cores that can be kept busy at a time.")
    memory_gib: float = Field(default=0, ge=0, description="Memory of the machine.")
    gpu: GpuNeeds | None = None


class InCluster(Described):
    """What pods of the class ask Kubernetes for."""

    node_selector: dict[str, str] = Field(default={}, description="Labels of its nodes.")
    gpu_resource: str = "nvidia.com/gpu"
    """Resource of which a pod asks for `gpus`."""


class PriceList(Described):
    """What a class costs. Set your own: the defaults are estimates, about those of rented machines.

    A rented machine's energy is in the price of its hours, so a kilowatt hour costs nothing more.
    """

    core_hour: float = Field(default=0.04, ge=0, description="Of one core, while it is busy.")
    gpu_hour: float = Field(default=2.5, ge=0, description="Of one GPU or slice, while it is held.")
    kwh: float = Field(default=0.0, ge=0, description="Of a kilowatt hour, where it is paid apart.")
    watts_per_core: float = Field(default=8.0, ge=0, le=200)
    """Of one busy core, where no meter can be read."""
    watts_per_gpu: float = Field(default=400.0, ge=0, le=5000)
    """Of one held GPU, where no meter can be read."""
    currency: str = Field(default="EUR", pattern=r"^[A-Z]{3}$", description="ISO 4217 code.")

    def money(self, cpu_s: float, gpu_s: float, joules: float) -> float:
        """Of seconds of busy cores and held GPUs, and of energy."""
        hours = (self.core_hour * cpu_s + self.gpu_hour * gpu_s) / S_PER_HOUR
        return hours + self.kwh * joules / J_PER_KWH


class HardwareClass(Described):
    """One class."""

    description: str = Field(min_length=1)
    requires: Needs = Needs()
    formats: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Variants that a conversion builds and judges there; none: those of the use case on
    processors, all that are for GPUs on GPUs."""
    kubernetes: InCluster = InCluster()
    prices: PriceList = PriceList()


class _File(RootModel[dict[ClassName, HardwareClass]]):
    @model_validator(mode="after")
    def _names_say_the_kind(self) -> Self:
        for name, found in self.root.items():
            if not NAME_IN_A_CLUSTER.fullmatch(name):
                raise ValueError(
                    f"{name} cannot name anything in Kubernetes; expected at most 50 letters, and "
                    "no dot beside a dash, another dot or at the end"
                )
            before, _, number = name.rpartition("-")
            if number.isdigit() and before in (CPU, GPU, *self.root):
                raise ValueError(f"{name} is what a further worker of {before} is called")
            kind = GPU if found.requires.gpu else CPU
            if kind_of(name) != kind:
                raise ValueError(
                    f"{name} requires {'a' if found.requires.gpu else 'no'} GPU, so its name must "
                    f"begin with {kind!r}"
                )
        return self


def read_classes(
    home: Path | None = None, environment: Mapping[str, str] = os.environ
) -> dict[str, HardwareClass]:
    """All hardware classes: the shipped ones, and those of this installation over them.

    Args:
        home: the state folder; None: that of the environment.
        environment: `FALAJ_HARDWARE` in it names the file of one's own.

    Raises:
        ConfigurationError: a file has a name twice, an unknown requirement, or a name that does
            not fit what is required; or the named file does not exist.
    """
    named = environment.get(FILE_VARIABLE)
    home = home or Settings.from_environment(environment).home
    own = Path(named).expanduser() if named else home / FILE_NAME
    found = _read(SHIPPED)
    try:
        return found | _read(own)
    except FileNotFoundError as exc:
        if not named:
            return found
        raise ConfigurationError(
            f"{FILE_VARIABLE} names {own}, which does not exist. Nothing was started"
        ) from exc


def class_of_run(classes: Mapping[str, HardwareClass], *, on_gpu: bool) -> tuple[str, PriceList]:
    """Name of the class that this process runs on, and its prices; without a pool that of its kind.

    Args:
        classes: all there are.
        on_gpu: the run holds GPUs.
    """
    name = os.environ.get(CLASS_VARIABLE) or (GPU if on_gpu else CPU)
    return name, classes.get(name, classes[kind_of(name)]).prices


def known_class(name: str, classes: Mapping[str, HardwareClass], who: str) -> HardwareClass:
    """The class of a name.

    Args:
        name: of the class.
        classes: all there are.
        who: names it, for the message.

    Raises:
        ConfigurationError: there is none.
    """
    if name not in classes:
        raise ConfigurationError(
            f"{who} names hardware class {name!r}, which does not exist; there are "
            f"{', '.join(classes)}. Name one of these, or describe it in {FILE_NAME} of the state "
            "folder. Nothing was changed"
        )
    return classes[name]


def _read(file: Path) -> dict[str, HardwareClass]:
    known = (
        f"Requirements are {', '.join(Needs.model_fields)}; of a GPU "
        f"{', '.join(GpuNeeds.model_fields)}. Nothing was started"
    )
    return checked(_File, read_yaml(file, str(file)), str(file), known).root
