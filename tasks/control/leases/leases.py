"""Leases: wait for devices of this host, hold them, work on them alone, give them back.

Cores and environment are inherited by a training's ranks, probes and guards.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import tenacity

from tasks.control.leases.config import LeaseRequest
from tasks.control.leases.devices import HostDevices
from tasks.control.leases.placement import HELD, Claim, Grant
from tasks.control.leases.repository import LEASE_VARIABLE, LeaseRepository, Outlook
from tasks.kernel.errors import LeaseError, LeaseLostError, StorageError, TransientError

LOGGER = logging.getLogger(__name__)
NORMAL_PRIORITY = 3
# Who is next looks again after this, who is second after twice as long, and so on.
SHORTEST_LOOK_S = 0.25
# How long the database may be away when a request is made that waits as long as it takes.
ASK_WITHIN_S = 120.0
ASK_AGAIN_S = 0.5
# After a refusal, the next try comes sooner than the next heartbeat would.
RETRIES_PER_BEAT = 8
THREADS_OF_THIS = Path("/proc/self/task")
OnWait = Callable[[Outlook], None]


class Heartbeat:
    """Keeps a lease, and reports once, in a thread of its own, when it is lost.

    The alarm does not ask the database, so it is in time even where that hangs.

    Args:
        renew: gives a heartbeat and returns the new deadline (`time.monotonic`); None where the
            lease is no longer there.
        deadline_s: when the lease is lost without a heartbeat.
        beat_s: seconds between two heartbeats.
        on_lost: gets the reason.
    """

    def __init__(
        self,
        renew: Callable[[], float | None],
        deadline_s: float,
        beat_s: float,
        on_lost: Callable[[str], None],
    ) -> None:
        self._renew, self._beat_s, self._on_lost = renew, beat_s, on_lost
        self._over, self._lock = threading.Event(), threading.Lock()
        self._set_alarm(deadline_s)
        threading.Thread(target=self._beat, name="lease-heartbeat", daemon=True).start()

    def stop(self) -> bool:
        """No more heartbeats, and no report of a loss; False where it was over before."""
        with self._lock:
            was_over = self._over.is_set()
            self._over.set()
            self._alarm.cancel()
        return not was_over

    def _set_alarm(self, deadline_s: float) -> None:
        with self._lock:
            if not self._over.is_set():
                left_s = max(0.0, deadline_s - time.monotonic())
                lost = ("no heartbeat could be given in time",)
                self._alarm = threading.Timer(left_s, self._lose, lost)
                self._alarm.daemon = True
                self._alarm.start()

    def _beat(self) -> None:
        pause_s = self._beat_s
        while not self._over.wait(pause_s):
            try:
                deadline_s = self._renew()
            except (TransientError, StorageError) as exc:
                LOGGER.warning("no heartbeat could be given, trying again: %s", exc)
                pause_s = self._beat_s / RETRIES_PER_BEAT
                continue
            if deadline_s is None:
                self._lose("its devices have been given to others")
                return
            self._alarm.cancel()
            self._set_alarm(deadline_s)
            pause_s = self._beat_s

    def _lose(self, reason: str) -> None:
        if self.stop():
            self._on_lost(reason)


class Lease:
    """Devices that this process holds until the context is left.

    A lease that is lost is not had again: `lost` is set, and whoever works on the devices has to
    stop within the grace of `LeaseTerms`.

    Args:
        repository: where it is written.
        claim: as it was granted.
        on_lost: gets the reason of a loss, in a thread of its own.

    Attributes:
        grant: the devices.
        token: fencing token, larger than that of each lease before.
        lease_id: what processes have in their environment that run under this lease.
        why_lost: a sentence about the loss.
    """

    def __init__(
        self,
        repository: LeaseRepository,
        claim: Claim,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self._repository, self._claim, self._on_lost = repository, claim, on_lost
        self._owner = os.getpid()
        self.grant, self.token = claim.grant or Grant(), claim.token or 0
        self.lease_id = claim.lease_id
        self.why_lost = ""
        self.lost = threading.Event()
        self._heartbeat = Heartbeat(
            lambda: repository.renew(claim.ticket),
            claim.deadline_s,
            repository.terms.beat_s,
            self._lose,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __str__(self) -> str:
        return f"lease {self.token} on {self.grant}"

    def check(self) -> None:
        """Do nothing while the lease holds.

        Raises:
            LeaseLostError: it is lost.
        """
        if self.lost.is_set():
            raise LeaseLostError(self.why_lost)

    def release(self) -> None:
        """Give the devices back; in a fork of the holder, nothing.

        Where the database does not answer, the lease is left to expire.
        """
        if os.getpid() == self._owner:
            self._heartbeat.stop()
            _give_back(self._repository, self._claim)

    def _lose(self, reason: str) -> None:
        self.why_lost = (
            f"{self} of {self._claim.holder} is lost: {reason}. Work on these devices had to stop; "
            "what was finished is kept, so run it again"
        )
        self.lost.set()
        LOGGER.error("%s", self.why_lost)
        if self._on_lost is not None:
            self._on_lost(self.why_lost)


def acquire(
    repository: LeaseRepository,
    request: LeaseRequest,
    holder: str,
    *,
    priority: int = NORMAL_PRIORITY,
    wait_s: float | None = None,
    devices: HostDevices | None = None,
    on_wait: OnWait | None = None,
    on_lost: Callable[[str], None] | None = None,
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
        on_lost: gets the reason, in a thread of its own, should the lease be lost later.

    Raises:
        ConfigurationError: this host does not have what is asked for.
        LeaseError: it was not to be had in time.
        TransientError, StorageError: the database does not answer, or refuses.
    """
    started_s = time.monotonic()
    found = devices or HostDevices.of_this_process()
    ask_again = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(TransientError),
        stop=tenacity.stop_after_delay(ASK_WITHIN_S if wait_s is None else wait_s),
        wait=tenacity.wait_fixed(ASK_AGAIN_S),
        before_sleep=tenacity.before_sleep_log(LOGGER, logging.WARNING),
        reraise=True,
    )
    claim = ask_again(repository.ask, request, holder, found, priority)
    if claim.state != HELD:
        until_s = float("inf") if wait_s is None else started_s + wait_s
        claim = _Waiter(repository, claim, until_s, on_wait).wait()
    lease = Lease(repository, claim, on_lost)
    LOGGER.info("%s for %s after %.1f s", lease, holder, time.monotonic() - started_s)
    return lease


def _give_back(repository: LeaseRepository, claim: Claim) -> None:
    try:
        repository.give_back(claim.ticket)
    except (TransientError, StorageError) as exc:
        LOGGER.warning("a claim could not be given back and will expire, %s: %s", claim, exc)


class _Waiter:
    """In line for devices, asleep most of the time."""

    def __init__(
        self, repository: LeaseRepository, claim: Claim, until_s: float, on_wait: OnWait | None
    ) -> None:
        self._repository, self._claim = repository, claim
        self._until_s, self._on_wait = until_s, on_wait
        self._outlook: Outlook | None = None
        self._next_beat_s = time.monotonic() + repository.terms.beat_s

    def wait(self) -> Claim:
        """Wait for the devices; whatever ends the wait, no claim stays in the line.

        Raises:
            LeaseError: they were not to be had in time.
        """
        try:
            while True:
                try:
                    self._look()
                except TransientError as exc:
                    LOGGER.warning("%s still waits: %s", self._claim.holder, exc)
                if self._claim.state == HELD:
                    return self._claim
                self._sleep()
        except BaseException:
            _give_back(self._repository, self._claim)
            raise

    def _look(self) -> None:
        """See whether the devices were given, or can be had, and give a heartbeat in time."""
        before, outlook = self._outlook, self._repository.outlook(self._claim)
        self._outlook = outlook
        if outlook.mine is None:
            self._queue_again()
            return
        self._claim = outlook.mine
        if outlook.is_my_turn:
            self._claim = self._repository.serve(self._claim) or self._claim
        elif before is None or before.num_before != outlook.num_before:
            if self._on_wait is not None and self._claim.state != HELD:
                self._on_wait(outlook)
        if self._claim.state != HELD and time.monotonic() >= self._next_beat_s:
            self._next_beat_s = time.monotonic() + self._repository.terms.beat_s
            self._repository.renew(self._claim.ticket)

    def _queue_again(self) -> None:
        """Get in line again, at the old place: the claim had been taken for a dead one's."""
        old = self._claim
        LOGGER.warning("%s was silent for too long and is put in line again", old.holder)
        self._claim = self._repository.ask(
            old.request, old.holder, old.devices, old.priority, old.due_s
        )

    def _sleep(self) -> None:
        """Sleep until something may have changed.

        Raises:
            LeaseError: there is no time left.
        """
        left_s = self._until_s - time.monotonic()
        num_before = self._outlook.num_before if self._outlook else 0
        if left_s <= 0:
            held = [str(each) for each in self._outlook.holders] if self._outlook else []
            raise LeaseError(
                f"{self._claim.holder} did not get {self._claim.request} in time. {num_before} are "
                f"before it in the line; held by {'; '.join(held) or 'nobody that could be read'}. "
                "Nothing was started; wait longer, raise its priority, or ask for less"
            )
        pause_s = min(SHORTEST_LOOK_S * (1 + num_before), self._repository.terms.longest_look_s)
        time.sleep(min(pause_s, left_s))


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
