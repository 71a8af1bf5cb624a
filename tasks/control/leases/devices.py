"""What this host has to lease: CPU cores by memory node, NVIDIA GPUs, and their limits.

Facts come from `/sys`, `/proc` and NVML. Where they show nothing, a host is one memory node of
cores that share nothing, without a GPU.
"""

import importlib.util
import logging
import os
import runpy
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

import psutil
import pynvml  # type: ignore[import-untyped]
from pydantic import Field

from tasks.contracts.hardware import CLASS_VARIABLE, GpuNeeds, Needs, known_class, read_classes
from tasks.kernel import cores
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.tenants import own_tenant, tenant_of
from tasks.kernel.values import Contract

LOGGER = logging.getLogger(__name__)


class CoreSet(Contract):
    """Cores of one memory node (NUMA)."""

    node: int = Field(ge=0, description="Number of the memory node.")
    physical: tuple[tuple[int, ...], ...] = Field(
        description="Its physical cores, each as the one or more cores that share it (SMT)."
    )

    @property
    def cores(self) -> tuple[int, ...]:
        """All cores, those that share a physical core beside each other."""
        return tuple(core for shared in self.physical for core in shared)


def core_sets(allowed: AbstractSet[int], sysfs: Path = cores.SYSFS) -> tuple[CoreSet, ...]:
    """The cores among `allowed` (`os.sched_getaffinity(0)`), by memory node."""
    found = cores.physical_cores_by_node(allowed, sysfs)
    return tuple(CoreSet(node=node, physical=physical) for node, physical in found.items())


NO_DEVICE_NAMES = ("", "-1", "none", "void", "nodevfiles")


NO_CUDA = (
    "the installed PyTorch is built without CUDA, so no GPU is used; install the build for the "
    "driver's CUDA version"
)


class Gpu(Contract):
    """A GPU, or a slice of one (MIG), that can be leased."""

    uuid: str = Field(min_length=1, description="`GPU-...` or `MIG-...`, as CUDA takes it.")
    name: str = Field(description="Model, such as `NVIDIA H200`.")
    memory_bytes: int = Field(ge=0, description="Memory of the device or slice, bytes.")
    mig_profile: str | None = Field(default=None, description="Of a slice, such as `1g.18gb`.")
    node: int | None = Field(default=None, description="Memory node it hangs on, if known.")


@dataclass(frozen=True)
class Found:
    """What a look at the host's GPUs has found; of unusable ones UUID, why, and what to do."""

    usable: tuple[Gpu, ...] = ()
    unusable: tuple[str, ...] = ()


def find_gpus(
    environment: Mapping[str, str], library: Any = pynvml, sysfs: Path = cores.SYSFS
) -> Found:
    """All NVIDIA devices; those in MIG mode as their slices.

    Args:
        environment: `CUDA_VISIBLE_DEVICES` in it hides devices from this process.
        library: the module `pynvml`.
        sysfs: where Linux shows hardware.

    Raises:
        ConfigurationError: `CUDA_VISIBLE_DEVICES` counts devices of different models.
    """
    try:
        library.nvmlInit()
    except (library.NVMLError_LibraryNotFound, library.NVMLError_DriverNotLoaded):
        return Found()
    except library.NVMLError as exc:
        return Found(unusable=(f"NVML refuses to start ({exc}); mend the driver's installation",))
    try:
        return _seen_by_nvml(library, environment, sysfs)
    finally:
        library.nvmlShutdown()


def _seen_by_nvml(library: Any, environment: Mapping[str, str], sysfs: Path) -> Found:
    usable: list[Gpu] = []
    unusable: list[str] = []
    handles = [
        library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())
    ]
    models = [str(library.nvmlDeviceGetName(handle)) for handle in handles]
    is_visible = _visibility(environment, models)
    for index, (handle, model) in enumerate(zip(handles, models, strict=True)):
        uuid = str(library.nvmlDeviceGetUUID(handle))
        node = cores.node_of_pci_device(str(library.nvmlDeviceGetPciInfo(handle).busId), sysfs)
        found = list(_leasable(library, handle, model, node))
        if not found:
            unusable.append(f"{uuid} is in MIG mode; make slices with `nvidia-smi mig -cgi`")
        for gpu in found:
            if is_visible(index, uuid) or is_visible(None, gpu.uuid):
                usable.append(gpu)
            else:
                unusable.append(f"{gpu.uuid} is hidden from this process by CUDA_VISIBLE_DEVICES")
    return Found(tuple(usable), tuple(unusable))


def _visibility(
    environment: Mapping[str, str], models: list[str]
) -> Callable[[int | None, str], bool]:
    """Tells whether CUDA shows a device, by its index among all or its (shortened) UUID."""
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return lambda index, uuid: index is not None
    listed = (part.strip() for part in value.split(","))
    # CUDA stops at the first name that is of no device.
    named = list(takewhile(lambda part: part.lower() not in NO_DEVICE_NAMES, listed))
    counted = [part for part in named if part.isdecimal()]
    by_place = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if counted and len(set(models)) > 1 and not by_place:
        raise ConfigurationError(
            f"CUDA_VISIBLE_DEVICES={value!r} counts devices, but CUDA and the driver count the "
            f"models of this host ({', '.join(sorted(set(models)))}) in different order; name "
            "devices by UUID (`nvidia-smi -L`), or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return lambda index, uuid: (
        (index is not None and str(index) in counted)
        or any(uuid.startswith(part) for part in named if not part.isdecimal())
    )


def _leasable(library: Any, handle: object, model: str, node: int | None) -> Iterator[Gpu]:
    is_cut = _is_cut(library, handle)
    for part in _slices(library, handle) if is_cut else (handle,):
        _, _, profile = str(library.nvmlDeviceGetName(part)).rpartition("MIG ")
        yield Gpu(
            uuid=str(library.nvmlDeviceGetUUID(part)),
            name=model,
            memory_bytes=int(library.nvmlDeviceGetMemoryInfo(part).total),
            mig_profile=profile if is_cut else None,  # of "NVIDIA H200 MIG 1g.18gb"
            node=node,
        )


def _is_cut(library: Any, handle: object) -> bool:
    try:
        return bool(library.nvmlDeviceGetMigMode(handle)[0] == library.NVML_DEVICE_MIG_ENABLE)
    except library.NVMLError_NotSupported:  # of a device that cannot be cut
        return False


def _slices(library: Any, handle: object) -> Iterator[object]:
    for index in range(library.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            yield library.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except library.NVMLError_NotFound:  # slices need not be numbered without gaps
            continue


def torch_cuda_version() -> str | None:
    """CUDA version that the installed PyTorch is built for, without importing PyTorch."""
    package = importlib.util.find_spec("torch")
    if package is None or not package.submodule_search_locations:
        return None
    version = runpy.run_path(str(Path(package.submodule_search_locations[0]) / "version.py"))
    return version.get("cuda")


GIB = 1 << 30
CPUINFO = Path("/proc/cpuinfo")


class HostDevices(Contract):
    """Devices of a host that one process may use."""

    core_sets: tuple[CoreSet, ...] = Field(description="CPU cores by memory node.")
    core_limit: cores.CoreLimit = Field(
        default=cores.CoreLimit(), description="How many of them its container may keep busy."
    )
    gpus: tuple[Gpu, ...] = Field(default=(), description="GPUs, and slices of GPUs.")
    tenant: str = Field(default="", description="Whose process it is; see `tenants.yaml`.")
    tenant_cores: int | None = Field(default=None, description="Cores that it holds at most.")
    tenant_gpus: int | None = Field(default=None, description="GPUs that it holds at most.")
    unusable: tuple[str, ...] = Field(
        default=(), description="Devices that are there and cannot be used, and why."
    )

    @classmethod
    def of_this_process(cls) -> "HostDevices":
        """What this process may use: in a run of a work pool the GPUs of its hardware class.

        Raises:
            ConfigurationError: this host is not of that class, or `CUDA_VISIBLE_DEVICES` or
                `hardware.yaml` cannot be understood.
        """
        name = os.environ.get(CLASS_VARIABLE)
        if not name:
            return cls.seen()
        needs, host = known_class(name, read_classes(), CLASS_VARIABLE).requires, Host.this()
        if lacking := host.lacks(needs):
            raise ConfigurationError(
                f"a worker of hardware class {name} runs on this host, which is not of it: "
                f"{'; '.join(lacking)}. Start it on one that is, or correct hardware.yaml. Nothing "
                "was run"
            )
        gpus = host.devices.fitting(needs.gpu) if needs.gpu else host.devices.gpus
        return host.devices.model_copy(update={"gpus": gpus})

    @classmethod
    def seen(cls) -> Self:
        """Look at this host: affinity, control groups, NVML; and at what its tenant may hold.

        Raises:
            ConfigurationError: `CUDA_VISIBLE_DEVICES` cannot be understood.
        """
        found, home = find_gpus(os.environ), Path(os.environ.get("FALAJ_HOME") or ".").resolve()
        own = own_tenant(home)
        if found.usable and torch_cuda_version() is None:
            found = Found(unusable=(*found.unusable, NO_CUDA))
        return cls(
            core_sets=core_sets(os.sched_getaffinity(0)),
            core_limit=cores.core_limit(),
            gpus=found.usable,
            unusable=found.unusable,
            tenant=tenant_of(home),
            tenant_cores=own.cores,
            tenant_gpus=own.gpus,
        )

    @property
    def num_cores(self) -> int:
        """Cores that can be kept busy at a time."""
        present = sum(len(each.cores) for each in self.core_sets)
        limits = (self.core_limit.num_cores, self.tenant_cores)
        return min([present, *(limit for limit in limits if limit is not None)])

    def fitting(self, needs: GpuNeeds) -> tuple[Gpu, ...]:
        """The GPUs that a hardware class is about."""
        profile = needs.mig_profile
        return tuple(
            gpu
            for gpu in self.gpus
            if (needs.model or "").lower() in gpu.name.lower()
            and gpu.memory_bytes >= needs.memory_gib * GIB
            and (profile is None or f"{gpu.mig_profile}.".startswith(f"{profile}."))
        )


@dataclass(frozen=True)
class Host:
    """What hardware classes ask of a host.

    Attributes:
        cpu_flags: as /proc/cpuinfo names them.
        memory_bytes: of the machine.
    """

    devices: HostDevices
    cpu_flags: frozenset[str]
    memory_bytes: int

    @classmethod
    def this(cls, cpuinfo: Path = CPUINFO) -> Self:
        """Look at this host.

        Raises:
            ConfigurationError: `CUDA_VISIBLE_DEVICES` cannot be understood.
        """
        devices = HostDevices.seen()
        return cls(devices, read_cpu_flags(cpuinfo), psutil.virtual_memory().total)

    def lacks(self, needs: Needs) -> list[str]:
        """What a class requires and this host does not have; empty where it is of the class."""
        devices, found = self.devices, list[str]()
        if missing := [flag for flag in needs.cpu_flags if flag not in self.cpu_flags]:
            found.append(f"its processors lack {', '.join(missing)}")
        if devices.num_cores < needs.cores:
            found.append(f"it has {devices.num_cores} core(s) of {needs.cores}")
        if self.memory_bytes < needs.memory_gib * GIB:
            has = self.memory_bytes / GIB
            found.append(f"it has {has:.1f} GiB of memory of {needs.memory_gib:g}")
        if (gpu := needs.gpu) and (number := len(devices.fitting(gpu))) < gpu.count:
            wanted = gpu.model_dump(exclude_defaults=True, exclude={"count"})
            which = ", ".join(f"{name}={value}" for name, value in wanted.items())
            of = f" ({which})" if which else ""
            found.append(f"it has {number} usable NVIDIA GPU(s){of} of {gpu.count}")
        return found


def read_cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """What the processors can do: `flags` on x86, `Features` on ARM; empty where nothing says."""
    named = (line.partition(":") for line in cores.text_of(cpuinfo).splitlines())
    flags = [rest.split() for name, _, rest in named if name.strip() in ("flags", "Features")]
    return frozenset(flags[0]) if flags else frozenset()


def hardware_classes(home: Path | None = None) -> tuple[str, ...]:
    """Hardware classes of this host, for which it can run workers, by `hardware.yaml`.

    The log says of each other class what the host lacks, and of GPUs why they cannot be used.

    Args:
        home: the state folder; None: that of the environment.

    Raises:
        ConfigurationError: `CUDA_VISIBLE_DEVICES` or `hardware.yaml` cannot be understood.
    """
    host, found = Host.this(), []
    for each in host.devices.unusable:
        LOGGER.warning("%s", each)
    for name, described in read_classes(home).items():
        if lacking := host.lacks(described.requires):
            LOGGER.info("this host is not of hardware class %s: %s", name, "; ".join(lacking))
        else:
            found.append(name)
    return tuple(found)
