"""Leases: wait for devices of this host, hold them, give them back."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Self

import tenacity

from tasks.control.leases.config import LeaseRequest
from tasks.control.leases.devices import HostDevices
from tasks.control.leases.placement import HELD, Claim, Grant
from tasks.control.leases.repository import LeaseRepository, Outlook
from tasks.control.leases.signals import Heartbeat, WakeUp
from tasks.kernel.errors import LeaseError, LeaseLostError, StorageError, TransientError

LOGGER = logging.getLogger(__name__)
NORMAL_PRIORITY = 3
# Who is next looks again after this, who is second after twice as long, and so on.
SHORTEST_LOOK_S = 0.25
# How long the database may be away when a request is made that waits as long as it takes.
ASK_WITHIN_S = 120.0
ASK_AGAIN_S = 0.5
OnWait = Callable[[Outlook], None]


class Lease:
    """Devices that this process holds until the context is left.

    A thread gives heartbeats. A lease that is lost is not had again: `lost` is set, and whoever
    works on the devices has to stop within the grace of `LeaseTerms`.

    Args:
        repository: where it is written.
        claim: as it was granted.
        on_lost: gets the reason of a loss, in a thread of its own.

    Attributes:
        grant: the devices.
        token: fencing token, larger than that of each lease before.
        mark: what processes have in their environment that run under this lease.
        devices: all that the process could use when it asked.
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
        self.mark, self.devices = claim.mark, claim.devices
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
        if os.getpid() != self._owner:
            return
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
        until_s = None if wait_s is None else started_s + wait_s
        claim = _Waiter(repository, claim, until_s, on_wait or (lambda _: None)).wait()
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
        self, repository: LeaseRepository, claim: Claim, until_s: float | None, on_wait: OnWait
    ) -> None:
        self._repository, self._claim = repository, claim
        self._until_s, self._on_wait = until_s, on_wait
        self._outlook: Outlook | None = None
        self._next_beat_s = time.monotonic() + repository.terms.beat_s
        self._wake_up = WakeUp(claim.mark)

    def wait(self) -> Claim:
        """Wait for the devices; whatever ends the wait, no claim stays in the line.

        Raises:
            LeaseError: they were not to be had in time.
        """
        try:
            while (claim := self._look()).state != HELD:
                self._sleep()
        except BaseException:
            _give_back(self._repository, self._claim)
            raise
        finally:
            self._wake_up.close()
        return claim

    def _look(self) -> Claim:
        """See whether the devices were given, or can be had; the claim as it then is."""
        try:
            if self._outlook is None or self._repository.has_changed(self._outlook):
                self._take_in(self._repository.outlook(self._claim))
            if self._claim.state != HELD and time.monotonic() >= self._next_beat_s:
                self._next_beat_s = time.monotonic() + self._repository.terms.beat_s
                if self._repository.renew(self._claim.ticket) is None:
                    self._queue_again()
        except TransientError as exc:
            LOGGER.warning("%s still waits: %s", self._claim.holder, exc)
            self._outlook = None
        return self._claim

    def _take_in(self, outlook: Outlook) -> None:
        before, self._outlook = self._outlook, outlook
        if outlook.mine is None:
            self._queue_again()
        elif outlook.mine.state == HELD:
            self._claim = outlook.mine
        elif outlook.is_my_turn:
            self._claim = self._repository.serve(self._claim) or self._claim
            self._outlook = None
        elif before is None or before.num_before != outlook.num_before:
            self._on_wait(outlook)

    def _queue_again(self) -> None:
        """Get in line again, at the old place: the claim had been taken for a dead one's."""
        old = self._claim
        LOGGER.warning("%s was silent for too long and is put in line again", old.holder)
        self._claim = self._repository.ask(
            old.request, old.holder, old.devices, old.priority, old.due_s
        )
        self._wake_up.close()
        self._wake_up = WakeUp(self._claim.mark)
        self._outlook = None

    def _sleep(self) -> None:
        """Sleep until something may have changed.

        Raises:
            LeaseError: there is no time left.
        """
        now_s = time.monotonic()
        until_s = float("inf") if self._until_s is None else self._until_s
        if now_s >= until_s:
            raise LeaseError(self._too_late())
        num_before = self._outlook.num_before if self._outlook else 0
        pause_s = min(SHORTEST_LOOK_S * (1 + num_before), self._repository.terms.longest_look_s)
        self._wake_up.sleep(min(now_s + pause_s, self._next_beat_s, until_s) - now_s)

    def _too_late(self) -> str:
        outlook, claim = self._outlook, self._claim
        held = [str(each) for each in outlook.holders] if outlook else []
        before = outlook.num_before if outlook else 0
        return (
            f"{claim.holder} did not get {claim.request} in time. {before} are before it in the "
            f"line; held by {'; '.join(held) or 'nobody that could be read'}. Nothing was started; "
            "wait longer, raise its priority, or ask for less"
        )
