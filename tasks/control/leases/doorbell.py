"""A nudge from one process of this machine to another that waits: look again, now.

Datagrams to abstract Unix sockets, which have no file and vanish with their process. A nudge says
nothing and is not needed: who is not reached, in another container say, looks a little later.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterable
from types import TracebackType
from typing import Self


class Doorbell:
    """Rings in the process that waits.

    Args:
        mark: random name of the claim, so that nobody else rings by mistake.
    """

    def __init__(self, mark: str) -> None:
        self._socket = _bell(mark)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()

    def answer_to(self, mark: str) -> None:
        """Ring for another claim from now on."""
        self._socket.close()
        self._socket = _bell(mark)

    def wait(self, limit_s: float) -> bool:
        """Sleep until it rings, at most so many seconds; False where it did not."""
        if not select.select([self._socket], [], [], max(0.0, limit_s))[0]:
            return False
        while True:
            try:
                self._socket.recv(1)
            except BlockingIOError:
                return True


def ring(marks: Iterable[str]) -> None:
    """Nudge those who wait with these marks, where they can be reached."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
        for mark in marks:
            try:
                sender.sendto(b"!", _address(mark))
            except OSError:  # it no longer waits, is elsewhere, or has been rung often enough
                continue


def _bell(mark: str) -> socket.socket:
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    bell.bind(_address(mark))
    return bell


def _address(mark: str) -> str:
    return f"\0falaj-lease-{mark}"
