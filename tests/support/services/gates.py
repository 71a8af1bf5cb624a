"""A way to a server that can be shut and opened again, as while the server is started anew."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CHUNK = 65_536


class Gate:
    """A port of the loopback device that leads to another, as long as it is open.

    Args:
        target: port of the server.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self.open()

    def open(self) -> None:
        """Let connections through, on the same port each time."""
        self._listener = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def shut(self) -> None:
        """Cut all connections, and refuse new ones."""
        assert self._listener
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for end in self._ends:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._ends.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # it was shut
                return
            with self._lock:
                self._ends += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(one, other), daemon=True).start()


@contextmanager
def gate(target: int) -> Iterator[Gate]:
    """An open gate, shut at the end of the block."""
    made = Gate(target)
    try:
        yield made
    finally:
        made.shut()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with source, suppress(OSError):
        while content := source.recv(CHUNK):
            sink.sendall(content)
        sink.shutdown(socket.SHUT_WR)
