"""What accelerators say of themselves, through NVIDIA's management library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pynvml  # type: ignore[import-untyped]

from tasks.contracts.telemetry import DeviceTelemetry
from tasks.training.telemetry.energy import EnergyCounter, PowerIntegral
from tasks.training.telemetry.running import Running

ALL = "all"


@dataclass(frozen=True)
class DeviceSample:
    """One look at one device; None for what its driver does not tell."""

    index: int
    name: str
    utilisation: float | None
    memory_bytes: int | None
    temperature_c: float | None
    power_w: float | None
    energy_mj: int | None
    """Millijoules since the driver was loaded."""


class DeviceReader(Protocol):
    """Looks at all devices that the ranks may use."""

    def read(self) -> Sequence[DeviceSample]:
        """One sample of each device."""

    def close(self) -> None:
        """Nothing is read any more."""


class NvmlReader:
    """Reads NVIDIA devices.

    Args:
        library: the module `pynvml`, initialised.
        visible: indices or UUIDs, as `CUDA_VISIBLE_DEVICES` names them, or `all`.
    """

    def __init__(self, library: Any, visible: str) -> None:
        self._library = library
        handles = {
            index: library.nvmlDeviceGetHandleByIndex(index)
            for index in range(library.nvmlDeviceGetCount())
        }
        self._handles = {
            index: handle
            for index, handle in handles.items()
            if is_visible(index, str(library.nvmlDeviceGetUUID(handle)), visible)
        }
        self._names = {
            index: str(library.nvmlDeviceGetName(handle)) for index, handle in self._handles.items()
        }

    def read(self) -> list[DeviceSample]:
        """One sample of each visible device."""
        return [self._sample(index, handle) for index, handle in self._handles.items()]

    def close(self) -> None:
        """Let go of the library."""
        self._library.nvmlShutdown()

    def _sample(self, index: int, handle: object) -> DeviceSample:
        library = self._library
        sensor = library.NVML_TEMPERATURE_GPU
        power_mw = self._told(lambda: library.nvmlDeviceGetPowerUsage(handle))
        utilisation = self._told(lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu)
        memory = self._told(lambda: library.nvmlDeviceGetMemoryInfo(handle).used)
        energy_mj = self._told(lambda: library.nvmlDeviceGetTotalEnergyConsumption(handle))
        return DeviceSample(
            index=index,
            name=self._names[index],
            utilisation=None if utilisation is None else utilisation / 100,
            memory_bytes=None if memory is None else int(memory),
            temperature_c=self._told(lambda: library.nvmlDeviceGetTemperature(handle, sensor)),
            power_w=None if power_mw is None else power_mw / 1000,
            energy_mj=None if energy_mj is None else int(energy_mj),
        )

    def _told(self, ask: Callable[[], float]) -> float | None:
        """The answer, or None: old devices and virtual ones do not know everything."""
        try:
            return ask()
        except self._library.NVMLError:
            return None


def is_visible(index: int, uuid: str, visible: str) -> bool:
    """True where CUDA shows the device to the ranks; a UUID may be shortened."""
    if visible == ALL:
        return True
    named = [part.strip() for part in visible.split(",") if part.strip()]
    return str(index) in named or any(
        uuid.startswith(part) for part in named if not part.lstrip("-").isdigit()
    )


def open_nvml(visible: str) -> tuple[NvmlReader | None, str]:
    """A reader of this host's NVIDIA devices and why there is none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        return None, f"NVML cannot be used ({exc})"
    return NvmlReader(pynvml, visible), ""


@dataclass
class DeviceHistory:
    """All samples of one device, added up."""

    name: str
    latest: DeviceSample | None = None
    utilisation: Running = field(default_factory=Running)
    power_w: Running = field(default_factory=Running)
    peak_memory_bytes: int | None = None
    temperature_max_c: float | None = None
    _integral: PowerIntegral = field(default_factory=PowerIntegral)
    _counter: EnergyCounter | None = None

    def add(self, now_s: float, sample: DeviceSample) -> None:
        """Take one sample."""
        self.latest = sample
        if sample.utilisation is not None:
            self.utilisation.add(sample.utilisation)
        if sample.power_w is not None:
            self.power_w.add(sample.power_w)
            self._integral.add(now_s, sample.power_w)
        if sample.energy_mj is not None:
            self._counter = self._counter or EnergyCounter(sample.energy_mj)
            self._counter.add(sample.energy_mj)
        if sample.memory_bytes is not None:
            self.peak_memory_bytes = max(self.peak_memory_bytes or 0, sample.memory_bytes)
        if sample.temperature_c is not None:
            self.temperature_max_c = max(self.temperature_max_c or -273.0, sample.temperature_c)

    @property
    def energy_j(self) -> float | None:
        """From the device's own counter; where it has none, from its power readings."""
        return self._integral.joules if self._counter is None else self._counter.counted / 1000

    def summary(self, index: int) -> DeviceTelemetry:
        """What is reported of the device."""
        return DeviceTelemetry(
            index=index,
            name=self.name,
            utilisation_mean=self.utilisation.mean,
            utilisation_max=self.utilisation.highest,
            peak_memory_bytes=self.peak_memory_bytes,
            temperature_max_c=self.temperature_max_c,
            power_mean_w=self.power_w.mean,
            energy_j=self.energy_j,
        )
