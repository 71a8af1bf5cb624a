"""Heartbeats of a process that holds a lease, and wake-ups of those that wait for one."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable

from tasks.kernel.errors import StorageError, TransientError

LOGGER = logging.getLogger(__name__)
# After a refusal, the next try comes sooner than the next heartbeat would.
RETRIES_PER_BEAT = 8


class Heartbeat:
    """Two threads: one gives heartbeats, one watches that they are in time.

    The second does not ask the database, so it reports in time even where that hangs.

    Args:
        renew: gives a heartbeat and returns the new deadline (`time.monotonic`); None where the
            lease is no longer there.
        deadline_s: when the lease is lost without a heartbeat.
        beat_s: seconds between two heartbeats.
        on_lost: gets the reason, once, in a thread of its own.
    """

    def __init__(
        self,
        renew: Callable[[], float | None],
        deadline_s: float,
        beat_s: float,
        on_lost: Callable[[str], None],
    ) -> None:
        self._renew, self._on_lost = renew, on_lost
        self._deadline_s, self._beat_s = deadline_s, beat_s
        self._changed = threading.Condition()
        self._is_over = False
        for target in (self._beat, self._watch):
            threading.Thread(target=target, name=f"lease{target.__name__}", daemon=True).start()

    def stop(self) -> None:
        """No more heartbeats, and no report of a loss."""
        self._end()

    def _beat(self) -> None:
        pause_s = self._beat_s
        while not self._wait_until(time.monotonic() + pause_s):
            pause_s = self._beat_s
            try:
                deadline_s = self._renew()
            except (TransientError, StorageError) as exc:
                left_s = self._deadline_s - time.monotonic()
                LOGGER.warning("lost in %.0f s, and no heartbeat: %s", max(0.0, left_s), exc)
                pause_s = self._beat_s / RETRIES_PER_BEAT
                continue
            if deadline_s is None:
                self._lose("its devices have been given to others")
                return
            with self._changed:
                self._deadline_s = deadline_s
                self._changed.notify_all()

    def _watch(self) -> None:
        while not self._wait_until(self._deadline_s):
            if time.monotonic() >= self._deadline_s:
                self._lose("no heartbeat could be given in time")
                return

    def _wait_until(self, moment_s: float) -> bool:
        """Wait until that moment, or for any change; True where it is all over."""
        with self._changed:
            if not self._is_over:
                self._changed.wait(max(0.0, moment_s - time.monotonic()))
            return self._is_over

    def _lose(self, reason: str) -> None:
        if self._end():
            self._on_lost(reason)

    def _end(self) -> bool:
        """False where it had ended before."""
        with self._changed:
            was_over, self._is_over = self._is_over, True
            self._changed.notify_all()
            return not was_over


class WakeUp:
    """Lets another process of this machine end the sleep of one that waits.

    Datagrams to abstract Unix sockets, which have no file and vanish with their process. A wake-up
    holds nothing and is not needed: who is not reached, in another container say, looks later.

    Args:
        mark: random name of the claim, so that nobody else is woken by mistake.
    """

    def __init__(self, mark: str) -> None:
        self._socket = _new_socket()
        self._socket.bind(_address(mark))

    def close(self) -> None:
        """Can be woken no more."""
        self._socket.close()

    def sleep(self, limit_s: float) -> None:
        """Sleep until woken, at most so many seconds."""
        if select.select([self._socket], [], [], max(0.0, limit_s))[0]:
            try:
                while True:
                    self._socket.recv(1)
            except BlockingIOError:
                return


def wake(marks: Iterable[str]) -> None:
    """Wake those who wait with these marks, where they can be reached."""
    with _new_socket() as sender:
        for mark in marks:
            try:
                sender.sendto(b"!", _address(mark))
            except OSError:  # it no longer waits, is elsewhere, or has been woken often enough
                continue


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)


def _address(mark: str) -> str:
    return f"\0falaj-lease-{mark}"
