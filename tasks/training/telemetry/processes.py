"""What the processes of a rank take from their host: cores, memory and disk."""

from __future__ import annotations

from dataclasses import dataclass, field

import psutil

from tasks.training.telemetry.running import Running


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
    def was_seen(self) -> bool:
        """True where there is at least one sample."""
        return bool(self._last)

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all processes that were ever seen."""
        return sum(p.cpu_s for p in self._last.values())

    @property
    def disk_read_bytes(self) -> int:
        """Read from disk, not from the page cache."""
        return sum(p.disk_read_bytes for p in self._last.values())

    @property
    def disk_written_bytes(self) -> int:
        """Written, sooner or later, to disk."""
        return sum(p.disk_written_bytes for p in self._last.values())
