"""The connections of one group of ranks, and how to break them all at once.

Gloo notices a lost rank only on the connection that it waits on: a rank that waits for another one,
which has noticed and left, does so until Gloo's time-out. A rank that has noticed, or was told by
the driver, therefore breaks all its connections of the group; the others then notice at once.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")


class GroupSockets:
    """Knows which TCP connections of this process belong to the group that it is in.

    May be used by several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group = 0
        self._broken_group = 0
        self._inodes: frozenset[str] = frozenset()

    @contextmanager
    def joining(self, group: int) -> Iterator[None]:
        """Take the connections that are made in this context for those of a group.

        They are broken up at its end where it has become known meanwhile that the group is broken.
        """
        before = frozenset(tcp_sockets())
        yield
        with self._lock:
            self._group = group
            self._inodes = frozenset(tcp_sockets()) - before
            if group == self._broken_group:
                self._shut_down()

    def left(self) -> None:
        """Forget the group: its connections are closed."""
        with self._lock:
            self._inodes = frozenset()

    def break_up(self, group: int) -> None:
        """Shut a group's connections down; whoever waits on one, here or there, gets an error.

        Args:
            group: number of the group that is broken; nothing happens where this process has left
                it, and where it is still about to join it, the end of `joining` does it.
        """
        with self._lock:
            self._broken_group = max(group, self._broken_group)
            if group == self._group:
                self._shut_down()

    def _shut_down(self) -> None:
        found = tcp_sockets()
        for inode in self._inodes & found.keys():
            with suppress(OSError), socket.socket(fileno=os.dup(found[inode])) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def tcp_sockets() -> dict[str, int]:
    """Descriptors of this process's connected TCP sockets, by the kernel's name of the socket."""
    found = {}
    for descriptor in [int(name) for name in os.listdir(DESCRIPTORS)]:
        with suppress(OSError):  # closed meanwhile
            name = os.readlink(DESCRIPTORS / str(descriptor))
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(descriptor)) as candidate:
                    is_tcp = candidate.type == socket.SOCK_STREAM
                    if is_tcp and candidate.family in (socket.AF_INET, socket.AF_INET6):
                        candidate.getpeername()
                        found[name] = descriptor
    return found
