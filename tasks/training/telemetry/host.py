"""What the driver's host does while a run lasts, and what each rank's processes take from it."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from tasks.contracts.telemetry import HostTelemetry

LOOPBACK = "lo"
# Drivers of processors' own sensors; disks and network cards have sensors too.
PROCESSOR_SENSORS = (
    "coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal",
)  # fmt: skip


@dataclass
class Running:
    """Mean and maximum of a stream of numbers; None before the first one."""

    total: float = 0.0
    count: int = 0
    latest: float | None = None
    highest: float | None = None

    def add(self, value: float | None) -> None:
        """Take one number; None is no number."""
        if value is None:
            return
        self.total += value
        self.count += 1
        self.latest = value
        self.highest = value if self.highest is None else max(self.highest, value)

    @property
    def mean(self) -> float | None:
        """Of all numbers."""
        return self.total / self.count if self.count else None


@dataclass(frozen=True)
class HostSample:
    """The host's counters at one moment; they only rise."""

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
    cards = psutil.net_io_counters(pernic=True)
    others = [card for name, card in cards.items() if name != LOOPBACK]
    return HostSample(
        # Time of guests is inside user time already.
        busy_s=cpu.user + cpu.nice + cpu.system + cpu.irq + cpu.softirq + cpu.steal,
        idle_s=cpu.idle + cpu.iowait,
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
    """All samples of the host, added up, from the moment it is made."""

    def __init__(self) -> None:
        self._first = self._last = look_at_host()
        self.cpu_share = Running()
        self.temperature_c = Running()

    def add(self, sample: HostSample) -> None:
        """Take one sample."""
        busy_s = sample.busy_s - self._last.busy_s
        all_s = busy_s + sample.idle_s - self._last.idle_s
        if all_s > 0:
            self.cpu_share.add(min(max(busy_s / all_s, 0.0), 1.0))
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


@dataclass(frozen=True)
class ProcessUse:
    """What one process has used since it started."""

    cpu_s: float
    resident_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int


def tree_use(pid: int) -> dict[int, ProcessUse]:
    """Process id to use, of a process and all its descendants; those that are gone are left out."""
    try:
        root = psutil.Process(pid)
        members = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return {}
    found = {}
    for member in members:
        try:
            with member.oneshot():
                cpu, disk = member.cpu_times(), member.io_counters()
                found[member.pid] = ProcessUse(
                    cpu_s=cpu.user + cpu.system,
                    resident_bytes=member.memory_info().rss,
                    disk_read_bytes=disk.read_bytes,
                    disk_written_bytes=disk.write_bytes,
                )
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@dataclass
class RankProcesses:
    """All samples of one rank's process tree. What an ended process used stays counted."""

    busy_cores: Running = field(default_factory=Running)
    resident_bytes: Running = field(default_factory=Running)
    _last: dict[int, ProcessUse] = field(default_factory=dict)
    _sampled_s: float | None = None

    def add(self, now_s: float, use: dict[int, ProcessUse]) -> None:
        """Take one sample; `now_s` only rises."""
        if not use:
            return
        before_s, cpu_before = self._sampled_s, self.cpu_s
        self._last |= use
        self._sampled_s = now_s
        self.resident_bytes.add(sum(p.resident_bytes for p in use.values()))
        if before_s is not None and now_s > before_s:
            # Never below 0, as it would be where a process id was given out again.
            self.busy_cores.add(max(0.0, self.cpu_s - cpu_before) / (now_s - before_s))

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all processes that were ever seen."""
        return sum(p.cpu_s for p in self._last.values())

    @property
    def disk_bytes(self) -> tuple[int, int] | tuple[None, None]:
        """Read from disk, not from the page cache; and written to it, sooner or later.

        None of both before the first sample.
        """
        if not self._last:
            return None, None
        uses = self._last.values()
        return sum(p.disk_read_bytes for p in uses), sum(p.disk_written_bytes for p in uses)
