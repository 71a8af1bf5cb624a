"""Leases: wait for devices of this host, hold them, give them back."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tasks.control.leases.book import LeaseBook, Outlook
from tasks.control.leases.claims import HELD, Claim, Grant
from tasks.control.leases.config import LeaseRequest
from tasks.control.leases.doorbell import Doorbell
from tasks.control.leases.hardware import HostDevices
from tasks.control.leases.heart import Heart
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

    Signs of life are given by a thread. A lease that is lost is not had again: `lost` is set, and
    whoever works on the devices has to stop within the grace of `LeaseConfig`.

    Args:
        book: where it is written.
        claim: as it was granted.
        on_lost: told why it was lost, in a thread of its own.
    """

    def __init__(
        self, book: LeaseBook, claim: Claim, on_lost: Callable[[str], None] | None = None
    ) -> None:
        self._book = book
        self._claim = claim
        self._on_lost = on_lost
        self._owner = os.getpid()
        self._reason = ""
        self.lost = threading.Event()
        self._heart = Heart(
            lambda: book.renew(claim.ticket), claim.deadline_s, book.config.beat_s, self._lose
        )
        self._heart.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __str__(self) -> str:
        return f"lease {self.token} on {self.grant}"

    @property
    def grant(self) -> Grant:
        """The devices."""
        return self._claim.grant or Grant()

    @property
    def token(self) -> int:
        """Fencing token: larger than that of each lease before."""
        return self._claim.token or 0

    @property
    def mark(self) -> str:
        """What processes have in their environment that run under this lease."""
        return self._claim.mark

    @property
    def devices(self) -> HostDevices:
        """All that the process could use when it asked."""
        return self._claim.devices

    def check(self) -> None:
        """Do nothing while the lease holds.

        Raises:
            LeaseLostError: it is lost.
        """
        if self.lost.is_set():
            raise LeaseLostError(self.why_lost)

    @property
    def why_lost(self) -> str:
        """A sentence about the loss."""
        return (
            f"{self} of {self._claim.holder} is lost: {self._reason}. Work on these devices had "
            "to stop; what was finished is kept, so run it again"
        )

    def release(self) -> None:
        """Give the devices back; in a fork of the holder, nothing.

        Where the database does not answer, the lease is left to expire.
        """
        if os.getpid() != self._owner:
            return
        self._heart.stop()
        try:
            self._book.give_back(self._claim.ticket)
        except (TransientError, StorageError) as exc:
            LOGGER.warning("%s could not be given back and will expire: %s", self, exc)

    def _lose(self, reason: str) -> None:
        self._reason = reason
        self.lost.set()
        LOGGER.error("%s", self.why_lost)
        if self._on_lost is not None:
            self._on_lost(self.why_lost)


def acquire(
    book: LeaseBook,
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
        book: the leases of this host.
        request: what is needed.
        holder: whose they will be, for people: the flow run's id and name.
        priority: 1 is the most urgent; see `placement` for the order.
        wait_s: longest wait in seconds; None waits as long as it takes.
        devices: what this process may use; looked up where it is not given.
        on_wait: told each time that the place in the line changes.
        on_lost: told why, in a thread of its own, should the lease be lost later.

    Raises:
        ConfigurationError: this host does not have what is asked for.
        LeaseError: it was not to be had in time.
        TransientError, StorageError: the database does not answer, or refuses.
    """
    started_s = time.monotonic()
    found = devices or HostDevices.of_this_process()
    until_s = None if wait_s is None else started_s + wait_s
    claim = _ask(book, request, holder, found, priority, until_s)
    if claim.state != HELD:
        claim = _Waiter(book, claim, until_s, on_wait or (lambda _: None)).wait()
    lease = Lease(book, claim, on_lost)
    LOGGER.info("%s for %s after %.1f s", lease, holder, time.monotonic() - started_s)
    return lease


def _ask(
    book: LeaseBook,
    request: LeaseRequest,
    holder: str,
    devices: HostDevices,
    priority: int,
    until_s: float | None,
) -> Claim:
    """Get into the line, also where the database is away, or too busy, for a while."""
    give_up_s = time.monotonic() + ASK_WITHIN_S if until_s is None else until_s
    while True:
        try:
            return book.ask(request, holder, devices, priority)
        except TransientError as exc:
            if time.monotonic() >= give_up_s:
                raise
            LOGGER.warning("%s asks again: %s", holder, exc)
            time.sleep(ASK_AGAIN_S)


class _Waiter:
    """Stands in line, asleep most of the time."""

    def __init__(
        self, book: LeaseBook, claim: Claim, until_s: float | None, on_wait: OnWait
    ) -> None:
        self._book = book
        self._claim = claim
        self._until_s = until_s
        self._on_wait = on_wait
        self._outlook: Outlook | None = None
        self._next_beat_s = time.monotonic() + book.config.beat_s
        self._bell = Doorbell(claim.mark)

    def wait(self) -> Claim:
        """Wait for the devices; whatever ends the wait, no claim stays in the line.

        Raises:
            LeaseError: they were not to be had in time.
        """
        try:
            with self._bell:
                while (claim := self._look()).state != HELD:
                    self._sleep()
        except BaseException:
            self._leave()
            raise
        return claim

    def _look(self) -> Claim:
        """See whether the devices were given, or can be had; the claim as it then is."""
        try:
            if self._outlook is None or self._book.has_changed(self._outlook):
                self._take_in(self._book.outlook(self._claim))
            if self._claim.state != HELD and time.monotonic() >= self._next_beat_s:
                self._give_sign_of_life()
        except TransientError as exc:
            LOGGER.warning("%s goes on waiting: %s", self._claim.holder, exc)
            self._outlook = None
        return self._claim

    def _take_in(self, outlook: Outlook) -> None:
        before, self._outlook = self._outlook, outlook
        if outlook.mine is None:
            self._queue_again()
        elif outlook.mine.state == HELD:
            self._claim = outlook.mine
        elif outlook.is_my_turn:
            self._claim = self._book.serve(self._claim) or self._claim
            self._outlook = None
        elif before is None or before.num_before != outlook.num_before:
            self._on_wait(outlook)

    def _give_sign_of_life(self) -> None:
        self._next_beat_s = time.monotonic() + self._book.config.beat_s
        if self._book.renew(self._claim.ticket) is None:
            self._queue_again()

    def _queue_again(self) -> None:
        """Stand in line anew, at the old place: the claim had been taken for a dead one's."""
        old = self._claim
        LOGGER.warning("%s was silent for too long and is put in line again", old.holder)
        self._claim = self._book.ask(old.request, old.holder, old.devices, old.priority, old.due_s)
        self._bell.answer_to(self._claim.mark)
        self._outlook = None

    def _sleep(self) -> None:
        """Sleep until something may have changed.

        Raises:
            LeaseError: there is no time left.
        """
        now_s = time.monotonic()
        if self._until_s is not None and now_s >= self._until_s:
            raise LeaseError(self._too_late())
        num_before = self._outlook.num_before if self._outlook else 0
        pause_s = min(SHORTEST_LOOK_S * (1 + num_before), self._book.config.longest_look_s)
        ends_s = [now_s + pause_s, self._next_beat_s]
        if self._until_s is not None:
            ends_s.append(self._until_s)
        self._bell.wait(min(ends_s) - now_s)

    def _too_late(self) -> str:
        outlook, claim = self._outlook, self._claim
        held = [str(each) for each in outlook.holders] if outlook else []
        before = outlook.num_before if outlook else 0
        return (
            f"{claim.holder} did not get {claim.request} in time. {before} are before it in the "
            f"line; held by {'; '.join(held) or 'nobody that could be read'}. Nothing was started; "
            "wait longer, raise its priority, or ask for less"
        )

    def _leave(self) -> None:
        try:
            self._book.give_back(self._claim.ticket)
        except (TransientError, StorageError) as exc:
            LOGGER.warning("a claim stays in line until it expires: %s", exc)
