"""Energy and money of a run: metered, else by a stated estimate, else unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.contracts.telemetry import DeviceTelemetry, EnergyUse, RunCost
from tasks.training.telemetry.config import TelemetryConfig

POWERCAP = Path("/sys/class/powercap")
J_PER_KWH = 3.6e6
S_PER_HOUR = 3600.0


class PowerIntegral:
    """Energy under a line of power readings, by the trapezoid rule."""

    def __init__(self) -> None:
        self.joules: float | None = None
        """None until two readings were taken."""
        self._last: tuple[float, float] | None = None

    def add(self, now_s: float, watts: float) -> None:
        """Take one reading; `now_s` only rises."""
        if self._last is not None:
            then_s, then_watts = self._last
            area = (now_s - then_s) * (watts + then_watts) / 2
            self.joules = (self.joules or 0.0) + area
        self._last = (now_s, watts)


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
    zones = [zone for zone in sorted(root.glob("intel-rapl:*")) if _is_counted(zone)]
    if not zones:
        return None, "this host shows no RAPL counters"
    try:
        return RaplMeter(zones), ""
    except PermissionError:
        return None, "RAPL counters may be read by root alone"
    except (OSError, ValueError) as exc:
        return None, f"RAPL counters cannot be read ({exc})"


def _is_counted(zone: Path) -> bool:
    try:
        name = (zone / "name").read_text().strip()
    except OSError:
        return False
    return name.startswith("package") or name == "dram"


def _microjoules(zone: Path) -> int:
    return int((zone / "energy_uj").read_text())


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
