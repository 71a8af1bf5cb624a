"""Energy and money of a run: metered, else by a stated estimate, else unknown; and NVIDIA devices.

Processors are read through Linux' powercap files, devices through NVIDIA's management library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped]

from tasks.contracts.telemetry import DeviceTelemetry, EnergyUse, RunCost
from tasks.training.telemetry.config import TelemetryConfig
from tasks.training.telemetry.host import Running

POWERCAP = Path("/sys/class/powercap")
J_PER_KWH = 3.6e6
S_PER_HOUR = 3600.0
ALL = "all"


@dataclass
class EnergyCounter:
    """A counter that rises with the energy used and starts again at 0 behind its range.

    Args:
        last: the first reading.
        range_: largest reading; None where the counter never starts again.
    """

    last: int
    range_: int | None = None
    counted: int = 0

    def add(self, reading: int) -> None:
        """Take one reading, in the counter's own unit. A second full turn in between is not seen.

        A counter without a range that falls was reset: it counts on from there.
        """
        gained = reading - self.last
        if gained < 0:
            gained = reading if self.range_ is None else gained + self.range_ + 1
        self.counted += gained
        self.last = reading


class RaplMeter:
    """The processor's own energy counters (Intel and AMD), as Linux shows them under powercap.

    Packages and their memory are added up; a `psys` zone is left out, since it holds both.

    Args:
        zones: folders of the zones.
    """

    def __init__(self, zones: Sequence[Path]) -> None:
        self._zones = {
            zone: EnergyCounter(_microjoules(zone), int((zone / "max_energy_range_uj").read_text()))
            for zone in zones
        }
        names = ", ".join(sorted((zone / "name").read_text().strip() for zone in zones))
        self.told = f"RAPL counters of {names}, everything on the host included"
        """What is measured."""

    def joules(self) -> float:
        """Energy since this meter was made; to be read more often than a counter turns over."""
        for zone, counter in self._zones.items():
            counter.add(_microjoules(zone))
        return sum(counter.counted for counter in self._zones.values()) / 1e6


def open_rapl(root: Path = POWERCAP) -> tuple[RaplMeter | None, str]:
    """The RAPL meter of this host and why there is none."""
    try:
        zones = [zone for zone in sorted(root.glob("intel-rapl:*")) if _is_counted(zone)]
        return (RaplMeter(zones), "") if zones else (None, "this host shows no RAPL counters")
    except PermissionError:
        return None, "RAPL counters may be read by root alone"
    except (OSError, ValueError) as exc:
        return None, f"RAPL counters cannot be read ({exc})"


def _is_counted(zone: Path) -> bool:
    name = (zone / "name").read_text().strip()
    return name.startswith("package") or name == "dram"


def _microjoules(zone: Path) -> int:
    return int((zone / "energy_uj").read_text())


@dataclass(frozen=True)
class DeviceSample:
    """One device at one moment; None for what its driver does not tell."""

    index: int
    name: str
    utilisation: float | None
    memory_bytes: int | None
    temperature_c: float | None
    power_w: float | None
    energy_mj: int | None
    """Millijoules since the driver was loaded."""


class NvmlReader:
    """Reads NVIDIA devices.

    Args:
        library: the module `pynvml`, initialised.
        visible: indices or UUIDs, as `CUDA_VISIBLE_DEVICES` names them, or `all`.
    """

    def __init__(self, library: Any, visible: str) -> None:
        self._library = library
        every = {
            i: library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())
        }
        self._handles = {
            index: handle
            for index, handle in every.items()
            if is_visible(index, str(library.nvmlDeviceGetUUID(handle)), visible)
        }

    def read(self) -> list[DeviceSample]:
        """One sample of each visible device."""
        return [self._sample(index, handle) for index, handle in self._handles.items()]

    def close(self) -> None:
        """Let go of the library."""
        self._library.nvmlShutdown()

    def _sample(self, index: int, handle: object) -> DeviceSample:
        nvml = self._library
        power_mw = self._answer(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        percent = self._answer(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        sensor = nvml.NVML_TEMPERATURE_GPU
        return DeviceSample(
            index=index,
            name=str(nvml.nvmlDeviceGetName(handle)),
            utilisation=None if percent is None else percent / 100,
            memory_bytes=self._answer(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            temperature_c=self._answer(lambda: nvml.nvmlDeviceGetTemperature(handle, sensor)),
            power_w=None if power_mw is None else power_mw / 1000,
            energy_mj=self._answer(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)),
        )

    def _answer(self, ask: Callable[[], int]) -> int | None:
        """The answer, or None: old devices and virtual ones do not know everything."""
        try:
            return int(ask())
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
    utilisation: Running = field(default_factory=Running)
    power_w: Running = field(default_factory=Running)
    memory_bytes: Running = field(default_factory=Running)
    temperature_c: Running = field(default_factory=Running)
    _counter: EnergyCounter | None = None

    def add(self, sample: DeviceSample) -> None:
        """Take one sample."""
        self.utilisation.add(sample.utilisation)
        self.power_w.add(sample.power_w)
        self.memory_bytes.add(sample.memory_bytes)
        self.temperature_c.add(sample.temperature_c)
        if sample.energy_mj is not None:
            self._counter = self._counter or EnergyCounter(sample.energy_mj)
            self._counter.add(sample.energy_mj)

    def summary(self, index: int) -> DeviceTelemetry:
        """What is reported of the device; its energy is known where it counts it itself."""
        peak_bytes = self.memory_bytes.highest
        return DeviceTelemetry(
            index=index,
            name=self.name,
            utilisation_mean=self.utilisation.mean,
            utilisation_max=self.utilisation.highest,
            peak_memory_bytes=None if peak_bytes is None else int(peak_bytes),
            temperature_max_c=self.temperature_c.highest,
            power_mean_w=self.power_w.mean,
            energy_j=self._counter.counted / 1000 if self._counter else None,
        )


def energy_use(
    config: TelemetryConfig,
    processor_j: float | None,
    processor_told: str,
    devices: Sequence[DeviceTelemetry],
    cpu_s: float,
) -> EnergyUse:
    """Put together what is known of a run's energy.

    Args:
        config: holds the estimate's watts, if one is wanted.
        processor_j: joules from the processor's meter, None without one.
        processor_told: what the meter measures, or why there is none.
        devices: accelerators with their joules.
        cpu_s: CPU seconds of the ranks, for the estimate.
    """
    known, told = processor_j, processor_told
    estimated = known is None and config.watts_per_core is not None
    if known is None and config.watts_per_core is not None:
        known = config.watts_per_core * cpu_s
        told = (
            f"estimated: {config.watts_per_core:g} W for each of {cpu_s:,.0f} CPU seconds, because "
            f"{processor_told}"
        )
    measured = [d.energy_j for d in devices if d.energy_j is not None]
    if measured:
        told = f"NVML of {len(measured)} device(s); {told}"
        known = sum(measured) + (known or 0.0)
    return EnergyUse(joules=known, known_by=told, estimated=estimated)


def run_cost(
    config: TelemetryConfig, energy: EnergyUse, seconds: float, num_hosts: int
) -> RunCost | None:
    """Money for energy and hosts; None where the configuration names no price that can be used."""
    energy_part = node_part = None
    if config.price_per_kwh is not None and energy.joules is not None:
        energy_part = energy.joules / J_PER_KWH * config.price_per_kwh
    if config.price_per_node_hour is not None:
        node_part = seconds / S_PER_HOUR * num_hosts * config.price_per_node_hour
    if energy_part is None and node_part is None:
        return None
    return RunCost(
        amount=(energy_part or 0.0) + (node_part or 0.0),
        currency=config.currency,
        energy_part=energy_part,
        node_part=node_part,
    )
