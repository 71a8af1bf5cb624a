"""Leases: wait for devices of this host, hold them, work on them alone, give them back.

Cores and environment are inherited by a training's ranks, probes and guards.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tasks.control.leases.config import LeaseRequest
from tasks.control.leases.devices import HostDevices
from tasks.control.leases.placement import Grant
from tasks.control.leases.repository import LEASE_VARIABLE, LeaseRepository, Outlook, OwnClaim
from tasks.kernel.errors import LeaseError

LOGGER = logging.getLogger(__name__)
NORMAL_PRIORITY = 3
# Who is next looks again after this, who is second after twice as long, and so on.
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.25, 15.0
THREADS_OF_THIS = Path("/proc/self/task")
OnWait = Callable[[Outlook], None]


class Lease:
    """Devices that this process holds until the context is left, or the process ends.

    Attributes:
        grant: the devices.
        lease_id: what processes have in their environment that run under this lease.
    """

    def __init__(self, own: OwnClaim) -> None:
        self._own = own
        self.grant, self.lease_id = own.claim.grant or Grant(), own.claim.lease_id

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the devices back."""
        self._own.close()


def acquire(
    repository: LeaseRepository,
    request: LeaseRequest,
    holder: str,
    *,
    priority: int = NORMAL_PRIORITY,
    wait_s: float | None = None,
    devices: HostDevices | None = None,
    on_wait: OnWait | None = None,
) -> Lease:
    """Wait until the devices are free and it is this request's turn, and take them.

    Args:
        repository: the leases of this host.
        request: what is needed.
        holder: whose they will be, for people: the flow run's id and name.
        priority: 1 is the most urgent; see `placement` for the order.
        wait_s: longest wait in seconds; None waits as long as it takes.
        devices: what this process may use; looked up where it is not given.
        on_wait: called each time that the place in the line changes.

    Raises:
        ConfigurationError: this host does not have what is asked for.
        LeaseError: it was not to be had in time.
        StorageError: the disk refuses.
    """
    started_s = time.monotonic()
    until_s = float("inf") if wait_s is None else started_s + wait_s
    own = repository.ask(request, holder, devices or HostDevices.of_this_process(), priority)
    try:
        _wait(own, until_s, on_wait)
    except BaseException:  # whatever ends the wait, no claim stays in the line
        own.close()
        raise
    waited_s = time.monotonic() - started_s
    LOGGER.info("%s holds %s after %.1f s", holder, own.claim.grant, waited_s)
    return Lease(own)


def _wait(own: OwnClaim, until_s: float, on_wait: OnWait | None) -> None:
    before: int | None = None
    while True:
        outlook = own.look()
        if own.claim.grant is not None:
            return
        if on_wait is not None and before != outlook.num_before:
            on_wait(outlook)
        before = outlook.num_before
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            held = "; ".join(map(str, outlook.holders)) or "nobody, but kept for those before it"
            raise LeaseError(
                f"{own.claim.holder} did not get {own.claim.request} in time. {before} are before "
                f"it in the line; held by {held}. Nothing was started; wait longer, raise its "
                "priority, or ask for less"
            )
        time.sleep(min(SHORTEST_LOOK_S * (1 + before), LONGEST_LOOK_S, left_s))


def variables_of(grant: Grant, lease_id: str) -> dict[str, str]:
    """Environment of a process under a lease; GPUs that it does not hold are hidden from it."""
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(grant.gpus), LEASE_VARIABLE: lease_id}
    if grant.cores:
        variables["OMP_NUM_THREADS"] = str(len(grant.cores))
    return variables


@contextmanager
def applied(grant: Grant, lease_id: str) -> Iterator[None]:
    """Confine this process, and what it starts, to the devices of a lease while inside.

    All threads that the process has are confined, and those that they start. Linux takes memory
    from the node of the core that first writes it, so that is near too.
    """
    variables, cores = variables_of(grant, lease_id), os.sched_getaffinity(0)
    before = {name: os.environ.get(name) for name in variables}
    _set_variables(variables)
    try:
        if grant.cores:
            _confine_threads(grant.cores)
        yield
    finally:
        _set_variables(before)
        if grant.cores:
            _confine_threads(cores)


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _confine_threads(cores: Iterable[int]) -> None:
    """Set the cores of every thread, until no new one has come meanwhile."""
    wanted, done = set(cores), set[int]()
    while present := {int(entry.name) for entry in THREADS_OF_THIS.iterdir()} - done:
        for thread in present:
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(thread, wanted)
        done |= present
