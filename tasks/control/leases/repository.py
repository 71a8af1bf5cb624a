"""Leases: wait for devices of this host, hold them, work on them alone, give them back.

The leases of one machine are files, one for each claim, locked by the process that it belongs to.

The kernel lets go of the lock of a process that dies, however it dies. So who holds and who waits
is known without heartbeats, and no clock that jumps gives anything away. Whoever decides holds one
more lock, so decisions are made one after the other. Cores and environment are inherited by a
training's ranks, probes and guards.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from tasks.control.config import LeaseRequest
from tasks.control.leases.devices import HostDevices
from tasks.control.leases.placement import Claim, Grant, Taken, due_s, grants_for, place
from tasks.kernel.errors import ConfigurationError, LeaseError, refused_writes_explained
from tasks.kernel.files import is_held, locked, private_folder
from tasks.kernel.process import boot_id, processes_by_variable, variables_set

LOGGER = logging.getLogger(__name__)
LEASE_VARIABLE = "FALAJ_LEASE"
"""What a lease's holder has in its environment, and everything that it starts inherits."""
DECIDING = "deciding.lock"
NORMAL_PRIORITY = 3
# Who is next looks again after this, who is second after twice as long, and so on.
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.25, 15.0
THREADS_OF_THIS = Path("/proc/self/task")


@dataclass(frozen=True)
class Outlook:
    """How things stand for one who waits.

    Args:
        num_before: how many who wait are served first.
        holders: who holds devices.
    """

    num_before: int
    holders: tuple[Claim, ...]


class LeaseRepository:
    """The leases of this machine in one folder, which several platforms may share.

    Every method may raise StorageError: the disk refuses.

    Args:
        folder: see `Settings.leases_path`; on a disk that several machines share, each boot of each
            has a folder of its own in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / boot_id()

    def ask(self, request: LeaseRequest, holder: str, devices: HostDevices, priority: int) -> Lease:
        """Put a request in line; it is served when its claim next looks.

        Args:
            request: what is wanted.
            holder: whose it will be, for people.
            devices: what the process may use.
            priority: 1 is the most urgent.

        Raises:
            ConfigurationError: this host does not have what is asked for.
        """
        _check_possible(request, devices)
        claim = Claim(
            lease_id=secrets.token_hex(8),
            holder=holder,
            pid=os.getpid(),
            priority=priority,
            due_s=due_s(time.monotonic(), priority),
            request=request,
            devices=devices,
            since=datetime.now(UTC),
        )
        with self.deciding():
            return Lease(self, claim)

    def claims(self) -> list[Claim]:
        """Who holds what and who waits, for people: holders first, then the line."""
        if not self.folder.is_dir():
            return []
        with self.deciding():
            found = list(self.living())
        return sorted(found, key=lambda claim: (claim.grant is None, claim.order))

    def deciding(self) -> AbstractContextManager[int]:
        """Be the only one on this machine who gives and frees."""
        return locked(private_folder(self.folder) / DECIDING)

    def living(self) -> Iterator[Claim]:
        """All claims that are somebody's, while `deciding`; files of dead holders are removed."""
        for path in self.folder.glob("*.json"):
            is_alive = is_held(path)
            try:
                claim = Claim.model_validate_json(path.read_text())
            except FileNotFoundError:  # it has just been given back
                continue
            except ValidationError:
                if not is_alive:  # its process was killed while it wrote
                    path.unlink(missing_ok=True)
                continue
            # What a dead holder had started still runs, under its guard, for some seconds.
            if is_alive or (claim.grant is not None and processes_of_lease(claim.lease_id)):
                yield claim
            else:
                LOGGER.warning("its process has ended: %s", claim.pid)
                path.unlink(missing_ok=True)


class Lease:
    """A claim of this process, in line or with devices, until it is released or the process ends.

    Args:
        repository: where it is; the caller is `deciding`.
        claim: as it is to be written.
    """

    def __init__(self, repository: LeaseRepository, claim: Claim) -> None:
        self._repository, self.claim = repository, claim
        self._owner = os.getpid()
        self._path = repository.folder / f"{claim.lease_id}.json"
        with refused_writes_explained(self._path):
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self._write(claim)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def grant(self) -> Grant:
        """The devices; none while it waits."""
        return self.claim.grant or Grant()

    @property
    def lease_id(self) -> str:
        """What processes have in their environment that run under this lease."""
        return self.claim.lease_id

    def _write(self, claim: Claim) -> None:
        with refused_writes_explained(self._path):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, claim.model_dump_json().encode(), 0)
        self.claim = claim

    def look(self) -> Outlook:
        """See how things stand, and take the devices if it is this claim's turn."""
        with self._repository.deciding():
            others = [c for c in self._repository.living() if c.lease_id != self.lease_id]
            own = self.claim.devices.tenant
            holders = tuple(each.seen_by(own) for each in others if each.grant is not None)
            line = [claim for claim in others if claim.grant is None]
            if self.claim.grant is None:
                grants = grants_for([*line, self.claim], Taken.by(holders))
                if grant := grants.get(self.lease_id):
                    now = datetime.now(UTC)
                    self._write(self.claim.model_copy(update={"grant": grant, "since": now}))
            return Outlook(sum(each.order < self.claim.order for each in line), holders)

    def release(self) -> None:
        """Leave the line, or give the devices back; in a fork of the process, nothing."""
        if self._descriptor >= 0 and os.getpid() == self._owner:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def processes_of_lease(lease_id: str) -> list[int]:
    """Process ids of everything that was started under a lease and still runs."""
    return processes_by_variable(LEASE_VARIABLE).get(lease_id, [])


def _check_possible(request: LeaseRequest, devices: HostDevices) -> None:
    """Reject what would be waited for in vain."""
    if place(request, devices, Taken()) is not None:
        return
    gpus = [f"{gpu.mig_profile or gpu.name} {gpu.uuid}" for gpu in devices.gpus]
    if devices.tenant_gpus is not None:
        gpus.append(f"{devices.tenant_gpus} of them at a time, as its tenant {devices.tenant}")
    unusable = "".join(f"; cannot be used: {each}" for each in devices.unusable)
    raise ConfigurationError(
        f"{request} cannot be leased here: this process may use {devices.num_cores} core(s) and "
        f"{', '.join(gpus) or 'no GPU'}{unusable}. Ask for less, or run where there is more"
    )


def acquire(
    repository: LeaseRepository,
    request: LeaseRequest,
    holder: str,
    *,
    priority: int = NORMAL_PRIORITY,
    wait_s: float | None = None,
    devices: HostDevices | None = None,
    on_wait: Callable[[Outlook], None] | None = None,
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
        own.release()
        raise
    waited_s = time.monotonic() - started_s
    LOGGER.info("%s holds %s after %.1f s", holder, own.grant, waited_s)
    return own


def _wait(own: Lease, until_s: float, on_wait: Callable[[Outlook], None] | None) -> None:
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
    cores = os.sched_getaffinity(0)
    with variables_set(variables_of(grant, lease_id)):
        try:
            if grant.cores:
                _confine_threads(grant.cores)
            yield
        finally:
            if grant.cores:
                _confine_threads(cores)


def _confine_threads(cores: Iterable[int]) -> None:
    """Set the cores of every thread, until no new one has come meanwhile."""
    wanted, done = set(cores), set[int]()
    while present := {int(entry.name) for entry in THREADS_OF_THIS.iterdir()} - done:
        for thread in present:
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(thread, wanted)
        done |= present
