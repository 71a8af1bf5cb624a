"""What the driver's host does while a run lasts, everything else on it included."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from tasks.contracts.telemetry import HostTelemetry
from tasks.training.telemetry.running import Running

LOOPBACK = "lo"
# Drivers of processors' own sensors; disks and network cards have sensors too.
PROCESSOR_SENSORS = (
    "coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal",
)  # fmt: skip


@dataclass(frozen=True)
class HostSample:
    """One look at the host; counters only rise."""

    busy_s: float
    idle_s: float
    temperature_c: float | None
    sent_bytes: int
    received_bytes: int
    loopback_bytes: int
    swapped_in_bytes: int


def look_at_host() -> HostSample:
    """One sample of this host."""
    cpu = psutil.cpu_times()
    idle_s = cpu.idle + cpu.iowait
    cards = psutil.net_io_counters(pernic=True)
    others = [card for name, card in cards.items() if name != LOOPBACK]
    return HostSample(
        # Time of guests is inside user time already.
        busy_s=cpu.user + cpu.nice + cpu.system + cpu.irq + cpu.softirq + cpu.steal,
        idle_s=idle_s,
        temperature_c=hottest(psutil.sensors_temperatures()),
        sent_bytes=sum(card.bytes_sent for card in others),
        received_bytes=sum(card.bytes_recv for card in others),
        loopback_bytes=cards[LOOPBACK].bytes_sent if LOOPBACK in cards else 0,
        swapped_in_bytes=psutil.swap_memory().sin,
    )


def computes_bf16(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """True where this host's processor is faster in bf16 than in fp32.

    That is where it has AMX, and AMD's AVX-512 BF16. Intel's without AMX was measured to be slower.
    """
    lines = cpu_info.read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    is_amd = any(line.startswith("vendor_id") and "AuthenticAMD" in line for line in lines)
    return "amx_bf16" in flags or (is_amd and "avx512_bf16" in flags)


class _Reading(Protocol):
    @property
    def current(self) -> float: ...


def hottest(sensors: Mapping[str, Sequence[_Reading]]) -> float | None:
    """Degrees Celsius of the hottest processor sensor; None where there is none."""
    readings = [r.current for name in PROCESSOR_SENSORS for r in sensors.get(name, ())]
    return max(readings, default=None)


class HostHistory:
    """All samples of the host, added up.

    Args:
        first: the sample at the start.
    """

    def __init__(self, first: HostSample) -> None:
        self._first = self._last = first
        self.cpu_share = Running()
        self.temperature_c = Running()

    def add(self, sample: HostSample) -> None:
        """Take one sample."""
        busy_s = sample.busy_s - self._last.busy_s
        whole_s = busy_s + sample.idle_s - self._last.idle_s
        if whole_s > 0:
            self.cpu_share.add(min(max(busy_s / whole_s, 0.0), 1.0))
        if sample.temperature_c is not None:
            self.temperature_c.add(sample.temperature_c)
        self._last = sample

    def summary(self) -> HostTelemetry:
        """What is reported of the host."""
        first, last = self._first, self._last
        return HostTelemetry(
            name=socket.gethostname(),
            num_cores=psutil.cpu_count() or 1,
            memory_bytes=psutil.virtual_memory().total,
            cpu_share_mean=self.cpu_share.mean,
            cpu_share_max=self.cpu_share.highest,
            temperature_max_c=self.temperature_c.highest,
            network_sent_bytes=max(0, last.sent_bytes - first.sent_bytes),
            network_received_bytes=max(0, last.received_bytes - first.received_bytes),
            loopback_bytes=max(0, last.loopback_bytes - first.loopback_bytes),
            swapped_in_bytes=max(0, last.swapped_in_bytes - first.swapped_in_bytes),
        )
