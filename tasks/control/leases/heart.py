"""Signs of life of one who holds a lease, and the word to it when the lease is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tasks.kernel.errors import StorageError, TransientError

LOGGER = logging.getLogger(__name__)
# After a refusal, the next try comes sooner than the next sign of life would.
RETRIES_PER_BEAT = 8


class Heart:
    """Two threads: one gives signs of life, one watches that they are in time.

    The second does not ask the database, so it speaks in time even where that hangs.

    Args:
        renew: gives a sign of life and returns the new deadline (`time.monotonic`); None where
            the lease is no longer there.
        deadline_s: when the lease is lost without a sign of life.
        beat_s: seconds between two signs.
        on_lost: told the reason, once, in a thread of its own.
    """

    def __init__(
        self,
        renew: Callable[[], float | None],
        deadline_s: float,
        beat_s: float,
        on_lost: Callable[[str], None],
    ) -> None:
        self._renew = renew
        self._deadline_s = deadline_s
        self._beat_s = beat_s
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._is_over = False
        self._threads = [
            threading.Thread(target=target, name=f"lease-{name}", daemon=True)
            for name, target in (("beat", self._beat), ("watch", self._watch))
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No more signs of life, and no more word."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _beat(self) -> None:
        pause_s = self._beat_s
        while not self._wait_until(time.monotonic() + pause_s):
            pause_s = self._beat_s
            try:
                deadline_s = self._renew()
            except (TransientError, StorageError) as exc:
                left_s = self._deadline_s - time.monotonic()
                LOGGER.warning("lost in %.0f s, and no sign of life: %s", max(0.0, left_s), exc)
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
                self._lose("no sign of life could be given in time")
                return

    def _wait_until(self, moment_s: float) -> bool:
        """Wait until that moment, or for any change; True where it is all over."""
        with self._changed:
            if not self._is_over:
                self._changed.wait(max(0.0, moment_s - time.monotonic()))
            return self._is_over

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._is_over:
                return
            self._is_over = True
            self._changed.notify_all()
        self._on_lost(reason)
