"""Claims: requests that wait for devices, and leases that hold them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.control.leases.config import PARTS_PER_GPU, LeaseRequest
from tasks.control.leases.hardware import HostDevices
from tasks.kernel.process import ProcessName

WAITING: Literal["waiting"] = "waiting"
HELD: Literal["held"] = "held"


class Grant(BaseModel):
    """What a lease gives."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cores: tuple[int, ...] = Field(default=(), description="Cores of this host.")
    gpus: dict[str, tuple[int, ...]] = Field(
        default={}, description="UUID to the parts of it, of `PARTS_PER_GPU`."
    )

    def units(self, boot: str) -> list[tuple[str, int]]:
        """Everything that nobody else may hold: a unit's name and the part of it.

        GPUs have names that are alone in the world; a core is one of a boot of a machine.
        """
        cores = [(core_unit(boot, core), 0) for core in self.cores]
        return cores + [(uuid, part) for uuid, parts in self.gpus.items() for part in parts]

    def __str__(self) -> str:
        said = [f"core(s) {','.join(map(str, self.cores))}"] if self.cores else []
        for uuid, parts in self.gpus.items():
            share = len(parts) / PARTS_PER_GPU
            said.append(uuid if share == 1 else f"{share:g} of {uuid}")
        return " and ".join(said)


def core_unit(boot: str, core: int) -> str:
    """Name of a core, alone among all machines and boots that share a database."""
    return f"{boot}/core-{core}"


class Claim(BaseModel):
    """One row of the table: somebody who waits, or holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ticket: int = Field(description="Number in order of arrival.")
    state: Literal["waiting", "held"]
    holder: str = Field(description="For people: the flow run, or whoever it is for.")
    host: str = Field(description="For people: name of the machine.")
    process: ProcessName
    mark: str = Field(description="What processes that run under the lease have as a sign of it.")
    priority: int = Field(description="1 is the most urgent.")
    due_s: float = Field(
        description="Place in the order, by the clock of its machine's boot; the smallest is next."
    )
    request: LeaseRequest
    devices: HostDevices = Field(description="What the process may use.")
    token: int | None = Field(default=None, description="Fencing token; larger with each lease.")
    grant: Grant | None = None
    requested_s: float = Field(description="When it was asked for; database's clock, Unix time.")
    granted_s: float | None = Field(default=None, description="When it was given; same clock.")
    expires_s: float = Field(description="When it is lost without a sign of life; same clock.")
    deadline_s: float = Field(description="The same by the clock of its machine's boot.")
    ttl_s: float
    grace_s: float
    beat: int = Field(description="Signs of life so far.")

    @property
    def order(self) -> tuple[float, int]:
        """Who has the smallest is served first."""
        return self.due_s, self.ticket

    def __str__(self) -> str:
        who = f"{self.holder} (process {self.process.pid} on {self.host})"
        return f"{who}: {self.grant or self.request}"
