"""Who gets which devices: pure functions of what is held and who waits.

The order is that of `Claim.due_s`: the moment of the request plus `AGEING_S` for each level of
priority below the most urgent. So priority decides among those that came together, a wait of
`AGEING_S` weighs as much as a level, and nobody is overtaken by a request that came more than
(own priority - 1) * `AGEING_S` after the own one: that bound is what rules starvation out.

Nobody is passed by: where the first in the order cannot be served, all that it could use is kept
for it, so that many small requests do not starve a large one. Others that need none of it go on.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Self

from pydantic import Field

from tasks.control.config import URGENT, LeaseRequest
from tasks.control.leases.devices import CoreSet, Gpu, HostDevices
from tasks.kernel.values import Contract, Frozen

AGEING_S = 600.0
"""Waiting that weighs as much as one level of priority."""


class Grant(Contract):
    """What a lease gives."""

    cores: tuple[int, ...] = Field(default=(), description="Cores of this host.")
    gpus: tuple[str, ...] = Field(default=(), description="UUIDs of GPUs, or of slices of GPUs.")

    def __str__(self) -> str:
        cores = [f"core(s) {','.join(map(str, self.cores))}"] if self.cores else []
        return " and ".join([*cores, *self.gpus])


class Claim(Frozen):
    """Somebody who waits, or holds."""

    lease_id: str = Field(description="What processes under the lease have in their environment.")
    holder: str = Field(description="For people: the flow run, or whoever it is for.")
    pid: int
    priority: int = Field(description="1 is the most urgent.")
    due_s: float = Field(
        description="Place in the order, by the clock of the machine's boot; the smallest is next."
    )
    ticket: int = Field(default=0, description="Written for earlier versions, which need it.")
    request: LeaseRequest
    devices: HostDevices = Field(description="What the process may use.")
    grant: Grant | None = Field(default=None, description="None while it waits.")
    since: datetime = Field(description="Since when it holds or waits; UTC.")

    @property
    def order(self) -> tuple[float, str]:
        """Who has the smallest is served first."""
        return self.due_s, self.lease_id

    def seen_by(self, tenant: str) -> Self:
        """The same; what another tenant runs is not said."""
        if self.devices.tenant == tenant:
            return self
        who = f"tenant {self.devices.tenant}" if self.devices.tenant else "the installation"
        return self.model_copy(update={"holder": who})

    def __str__(self) -> str:
        return f"{self.holder} (process {self.pid}): {self.grant or self.request}"


@dataclass
class Taken:
    """What cannot be given: GPUs, cores, and what control groups and tenants hold."""

    cores: set[int] = field(default_factory=set)
    gpus: set[str] = field(default_factory=set)
    cores_of_group: Counter[str] = field(default_factory=Counter)
    cores_of_tenant: Counter[str] = field(default_factory=Counter)
    gpus_of_tenant: Counter[str] = field(default_factory=Counter)

    @classmethod
    def by(cls, held: Iterable[Claim]) -> Self:
        """What leases hold."""
        taken = cls()
        for claim in held:
            if claim.grant is not None:
                taken.add(claim.grant, claim.devices)
        return taken

    def add(self, grant: Grant, devices: HostDevices) -> None:
        """Take what a grant gives."""
        self.gpus |= set(grant.gpus)
        self.cores |= set(grant.cores)
        self.cores_of_group[devices.core_limit.group] += len(grant.cores)
        self.cores_of_tenant[devices.tenant] += len(grant.cores)
        self.gpus_of_tenant[devices.tenant] += len(grant.gpus)

    def is_beyond_tenant(self, request: LeaseRequest, devices: HostDevices) -> bool:
        """Whether a request is for more than its tenant may hold beside what it holds."""
        limits = (
            (devices.tenant_cores, self.cores_of_tenant, request.cores),
            (devices.tenant_gpus, self.gpus_of_tenant, request.gpus),
        )
        return any(
            limit is not None and held[devices.tenant] + wanted > limit
            for limit, held, wanted in limits
        )

    def keep_for(self, claim: Claim) -> None:
        """Take all that a claim which cannot be served yet could use."""
        if self.is_beyond_tenant(claim.request, claim.devices):  # that is its tenant's alone
            self.cores_of_tenant[claim.devices.tenant] += claim.request.cores
            self.gpus_of_tenant[claim.devices.tenant] += claim.request.gpus
            return
        if claim.request.cores:
            self.cores |= {core for each in claim.devices.core_sets for core in each.cores}
        self.gpus |= {gpu.uuid for gpu in fitting_gpus(claim.request, claim.devices)}


def due_s(requested_s: float, priority: int) -> float:
    """Place in the order of one who asks: see the top of this module."""
    return requested_s + (priority - URGENT) * AGEING_S


def grants_for(waiting: Sequence[Claim], taken: Taken) -> dict[str, Grant]:
    """What those who wait may take now, by lease, in the order in which they are served.

    All of it is to be given at once: what the next may take depends on where the first was placed.

    Args:
        waiting: all who wait on this machine, in any order.
        taken: what is held; what is granted and kept is added to it.
    """
    grants = {}
    for claim in sorted(waiting, key=lambda each: each.order):
        grant = place(claim.request, claim.devices, taken)
        if grant is None:
            taken.keep_for(claim)
        else:
            taken.add(grant, claim.devices)
            grants[claim.lease_id] = grant
    return grants


def place(request: LeaseRequest, devices: HostDevices, taken: Taken) -> Grant | None:
    """Devices that serve a request, none of them taken; None where there are too few."""
    if taken.is_beyond_tenant(request, devices):
        return None
    gpus = _choose_gpus(request, devices, taken)
    if len(gpus) < request.gpus:
        return None
    near = {gpu.node for gpu in gpus if gpu.node is not None}
    cores = _choose_cores(request.cores, near, devices, taken)
    if len(cores) < request.cores:
        return None
    return Grant(cores=cores, gpus=tuple(gpu.uuid for gpu in gpus))


def fitting_gpus(request: LeaseRequest, devices: HostDevices) -> list[Gpu]:
    """The GPUs that a request may be served with, taken or not."""
    if not request.gpus:
        return []
    return [gpu for gpu in devices.gpus if gpu.mig_profile == request.mig_profile]


def _choose_gpus(request: LeaseRequest, devices: HostDevices, taken: Taken) -> list[Gpu]:
    """Free GPUs, on the memory node with the least room that is enough where there is one."""
    free = [gpu for gpu in fitting_gpus(request, devices) if gpu.uuid not in taken.gpus]
    by_node: dict[int | None, list[Gpu]] = defaultdict(list)
    for gpu in free:
        by_node[gpu.node].append(gpu)
    enough = [group for group in by_node.values() if len(group) >= request.gpus]
    return min(enough, key=len, default=free)[: request.gpus]


def _choose_cores(
    number: int, near: set[int], devices: HostDevices, taken: Taken
) -> tuple[int, ...]:
    """Cores on the fewest memory nodes, near the GPUs; fewer than asked for where there are none.

    Among nodes that have enough, the one with the least room is taken, so that large requests
    still find one node later.
    """
    limit = devices.core_limit
    used = taken.cores_of_group[limit.group]
    if limit.num_cores is not None and used + number > limit.num_cores:
        return ()
    free = {each.node: _free_cores(each, taken) for each in devices.core_sets}
    chosen: list[int] = []

    def preference(node: int) -> tuple[bool, bool, int]:
        room = len(free[node])
        is_enough = room >= number - len(chosen)
        return not is_enough, node not in near, room if is_enough else -room

    while len(chosen) < number and free:
        chosen += free.pop(min(free, key=preference))[: number - len(chosen)]
    return tuple(sorted(chosen))


def _free_cores(each: CoreSet, taken: Taken) -> list[int]:
    """Free cores of a node: first those whose whole physical core is free."""
    free = [[core for core in shared if core not in taken.cores] for shared in each.physical]
    pairs = zip(free, each.physical, strict=True)
    by_use = sorted(pairs, key=lambda pair: len(pair[0]) < len(pair[1]))
    return [core for group, _ in by_use for core in group]
