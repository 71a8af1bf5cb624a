"""Which process holds a lease, and whether it, or anything that it started, is still there.

A process id alone is no name: ids come again. The machine's boot, the namespace of process ids and
the moment of the start make one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

PROCFS = Path("/proc")
# What a lease's holder finds in its environment, and everything that it starts inherits.
LEASE_VARIABLE = "FALAJ_LEASE"
ENDED_STATES = ("Z", "X")
STATE_FIELD, START_FIELD = 0, 19  # of /proc/PID/stat, counted after the command's name


class ProcessName(BaseModel):
    """One process of one boot of one machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    boot: str = Field(description="Id of the machine's boot.")
    space: str = Field(description="Namespace of process ids, such as a container has its own.")
    pid: int = Field(ge=1, description="Process id.")
    start: int = Field(ge=0, description="Its start, in clock ticks since the boot.")

    @classmethod
    def of_this(cls, procfs: Path = PROCFS) -> Self:
        """The calling process."""
        pid = os.getpid()
        return cls(
            boot=boot_id(procfs), space=_space(procfs), pid=pid, start=start_of(pid, procfs) or 0
        )

    def is_visible_to(self, other: ProcessName) -> bool:
        """True where `other` can see in `/proc` whether this process is there."""
        return (self.boot, self.space) == (other.boot, other.space)

    def has_ended(self, procfs: Path = PROCFS) -> bool:
        """True where the process is gone; to be asked only where it is visible."""
        return start_of(self.pid, procfs) != self.start


def boot_id(procfs: Path = PROCFS) -> str:
    """Id of this boot of this machine; containers on it have the same."""
    return (procfs / "sys/kernel/random/boot_id").read_text().strip()


def kin_of_lease(mark: str, procfs: Path = PROCFS) -> list[int]:
    """Process ids of everything that was started under a lease and still runs.

    Processes of other users, whose environment cannot be read, are not seen.

    Args:
        mark: value of `LEASE_VARIABLE` under the lease.
        procfs: where Linux shows processes.
    """
    variable = f"{LEASE_VARIABLE}={mark}".encode()
    found = []
    for entry in procfs.iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # it has just ended, or is another user's
                continue
            if variable in variables and start_of(int(entry.name), procfs) is not None:
                found.append(int(entry.name))
    return found


def start_of(pid: int, procfs: Path) -> int | None:
    """Start of a process in clock ticks since the boot; None where it is not there or has ended."""
    try:
        text = (procfs / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[STATE_FIELD] in ENDED_STATES else int(fields[START_FIELD])


def _space(procfs: Path) -> str:
    return os.readlink(procfs / "self" / "ns" / "pid")
