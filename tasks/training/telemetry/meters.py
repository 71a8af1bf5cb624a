"""What the driver can read of its host: processors, devices and energy.

Energy is metered, else estimated by stated watts; money is by the price list.
"""

import socket
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pynvml  # type: ignore[import-untyped]

from tasks.contracts.hardware import PriceList
from tasks.contracts.telemetry import DeviceTelemetry, EnergyUse, HostTelemetry

POWERCAP = Path("/sys/class/powercap")
LOOPBACK = "lo"
# Drivers of processors' own sensors; disks and network cards have sensors too.
PROCESSOR_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal")


@dataclass
class Running:
    """Mean and maximum of a stream of numbers; None before the first one."""

    total: float = 0.0
    count: int = 0
    lowest: float | None = None
    highest: float | None = None

    def add(self, value: float | None) -> None:
        """Take one number; None is no number."""
        if value is not None:
            self.total += value
            self.count += 1
            self.lowest = value if self.lowest is None else min(self.lowest, value)
            self.highest = value if self.highest is None else max(self.highest, value)

    @property
    def mean(self) -> float | None:
        """Of all numbers."""
        return self.total / self.count if self.count else None

    @property
    def spread(self) -> float | None:
        """What a counter, which only rises, has gained."""
        return None if self.highest is None or self.lowest is None else self.highest - self.lowest


class ProcessorMeter:
    """The processor's own energy counters (Intel and AMD: RAPL), as Linux shows them.

    Packages and their memory are added up; a `psys` zone is left out, since it holds both. A
    counter starts again at 0 behind its range, so it is to be read more often than it turns over.

    Args:
        root: folder of the powercap zones.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._last: dict[Path, int] = {}
        self._microjoules = 0
        self.known_by = "this host shows no RAPL counters"
        """What is measured, or why nothing is."""
        try:
            names = {z: (z / "name").read_text().strip() for z in root.glob("intel-rapl:*")}
            zones = {z: n for z, n in names.items() if n.startswith("package") or n == "dram"}
            self._last = {zone: _read_number(zone / "energy_uj") for zone in zones}
        except (OSError, ValueError) as exc:
            self.known_by = f"RAPL counters cannot be read ({exc}); most hosts allow it to root"
        if self._last:
            counted = ", ".join(sorted(zones.values()))
            self.known_by = f"RAPL counters of {counted}, everything on the host included"

    def joules(self) -> float | None:
        """Energy since this meter was made; a counter that fails is not asked again."""
        try:
            for zone, last in self._last.items():
                reading = _read_number(zone / "energy_uj")
                turned = _read_number(zone / "max_energy_range_uj") + 1 if reading < last else 0
                self._microjoules += reading + turned - last
                self._last[zone] = reading
        except (OSError, ValueError) as exc:
            self._last = {}
            self.known_by = f"the RAPL counters could not be read to the end ({exc})"
        return self._microjoules / 1e6 if self._last else None


def _read_number(path: Path) -> int:
    return int(path.read_text())


@dataclass
class _Device:
    handle: Any
    name: str
    seen: defaultdict[str, Running] = field(default_factory=lambda: defaultdict(Running))


class DeviceMeter:
    """NVIDIA devices of the ranks; a device's energy is known where it counts it itself.

    Args:
        visible: `CUDA_VISIBLE_DEVICES` of the ranks; None for all devices.
        library: the module `pynvml`.
    """

    def __init__(self, visible: str | None, library: Any = pynvml) -> None:
        self._nvml = library
        self._devices: dict[int, _Device] = {}
        self.trouble = ""
        """Why no device can be read; empty where they can."""
        try:
            library.nvmlInit()
        except library.NVMLError as exc:
            self.trouble = f"NVML cannot be used ({exc})"
            return
        for index in range(library.nvmlDeviceGetCount()):
            with suppress(library.NVMLError):  # one that is lost or forbidden is not of these ranks
                handle = library.nvmlDeviceGetHandleByIndex(index)
                if is_visible(index, str(library.nvmlDeviceGetUUID(handle)), visible):
                    self._devices[index] = _Device(handle, str(library.nvmlDeviceGetName(handle)))

    def sample(self) -> None:
        """Read all devices once."""
        nvml = self._nvml
        for device in self._devices.values():
            of, seen = device.handle, device.seen
            readings: dict[str, Callable[[Any], float]] = {
                "utilisation": lambda of: nvml.nvmlDeviceGetUtilizationRates(of).gpu / 100,
                "memory_bytes": lambda of: nvml.nvmlDeviceGetMemoryInfo(of).used,
                "celsius": lambda of: nvml.nvmlDeviceGetTemperature(of, nvml.NVML_TEMPERATURE_GPU),
                "watts": lambda of: nvml.nvmlDeviceGetPowerUsage(of) / 1000,
                "joules": lambda of: nvml.nvmlDeviceGetTotalEnergyConsumption(of) / 1000,
            }
            for name, read in readings.items():
                with suppress(nvml.NVMLError):  # old and virtual devices do not know everything
                    seen[name].add(float(read(of)))

    def summaries(self) -> tuple[DeviceTelemetry, ...]:
        """What is reported of each device."""
        return tuple(
            DeviceTelemetry.model_validate(
                {
                    "index": index,
                    "name": each.name,
                    "utilisation_mean": each.seen["utilisation"].mean,
                    "utilisation_max": each.seen["utilisation"].highest,
                    "peak_memory_bytes": each.seen["memory_bytes"].highest,
                    "temperature_max_c": each.seen["celsius"].highest,
                    "power_mean_w": each.seen["watts"].mean,
                    "energy_j": each.seen["joules"].spread,
                }
            )
            for index, each in self._devices.items()
        )

    def close(self) -> None:
        """Let go of the library."""
        if not self.trouble:
            self._nvml.nvmlShutdown()


def is_visible(index: int, uuid: str, visible: str | None) -> bool:
    """True where CUDA shows the device to the ranks; a UUID may be shortened."""
    named = [part.strip() for part in (visible or "").split(",") if part.strip()]
    by_uuid = any(uuid.startswith(part) for part in named if not part.lstrip("-").isdigit())
    return visible is None or str(index) in named or by_uuid


def energy_use(
    prices: PriceList,
    processor_j: float | None,
    processor_known_by: str,
    devices: tuple[DeviceTelemetry, ...],
    cpu_s: float,
) -> EnergyUse:
    """Put together what is known of a run's energy.

    Args:
        prices: holds the estimate's watts.
        processor_j: joules from the processor's meter, None without one.
        processor_known_by: what the meter measures, or why there is none.
        devices: accelerators with their joules.
        cpu_s: CPU seconds of the ranks, for the estimate.
    """
    known, known_by, watts = processor_j, processor_known_by, prices.watts_per_core
    if known is None:
        known = watts * cpu_s
        known_by = (
            f"estimated: {watts:g} W for each of {cpu_s:,.0f} CPU seconds, because "
            f"{processor_known_by}"
        )
    measured = [d.energy_j for d in devices if d.energy_j is not None]
    if measured:
        known_by = f"NVML of {len(measured)} device(s); {known_by}"
        known += sum(measured)
    return EnergyUse(joules=known, known_by=known_by, estimated=processor_j is None)


class HostMeter:
    """The driver's host from the moment this is made, everything else on it included."""

    def __init__(self) -> None:
        self._first = self._counters()
        self._cpu_share, self._temperature_c = Running(), Running()
        self._cpu_s = self._processor_s()

    @staticmethod
    def _processor_s() -> tuple[float, float]:
        """Seconds of all cores since the boot: idle ones, and all."""
        cpu = psutil.cpu_times()
        return cpu.idle + cpu.iowait, sum(cpu[:8])  # time of guests is inside user time already

    @staticmethod
    def _counters() -> tuple[int, ...]:
        """Bytes sent and received by all interfaces but loopback, by that, and swapped in."""
        cards = psutil.net_io_counters(pernic=True)
        inner = cards.pop(LOOPBACK, None)
        return (
            sum(card.bytes_sent for card in cards.values()),
            sum(card.bytes_recv for card in cards.values()),
            inner.bytes_sent if inner else 0,
            psutil.swap_memory().sin,
        )

    def sample(self) -> None:
        """Look at the host once."""
        before, self._cpu_s = self._cpu_s, self._processor_s()
        idle_s, all_s = (now - then for now, then in zip(self._cpu_s, before, strict=True))
        if all_s > 0:
            self._cpu_share.add(min(max(1 - idle_s / all_s, 0.0), 1.0))
        sensors = psutil.sensors_temperatures()
        found = [each.current for name in PROCESSOR_SENSORS for each in sensors.get(name, ())]
        self._temperature_c.add(max(found, default=None))

    def summary(self) -> HostTelemetry:
        """What is reported of the host."""
        sent, received, loopback, swapped = (
            max(0, now - then) for now, then in zip(self._counters(), self._first, strict=True)
        )
        return HostTelemetry(
            name=socket.gethostname(),
            num_cores=psutil.cpu_count() or 1,
            memory_bytes=psutil.virtual_memory().total,
            cpu_share_mean=self._cpu_share.mean,
            cpu_share_max=self._cpu_share.highest,
            temperature_max_c=self._temperature_c.highest,
            network_sent_bytes=sent,
            network_received_bytes=received,
            loopback_bytes=loopback,
            swapped_in_bytes=swapped,
        )


def computes_bf16() -> bool:
    """True where this host's processor is faster in bf16 than in fp32.

    That is where it has AMX, and AMD's AVX-512 BF16. Intel's without AMX was measured to be slower.
    """
    words = set(Path("/proc/cpuinfo").read_text().split())
    return "amx_bf16" in words or ("AuthenticAMD" in words and "avx512_bf16" in words)
