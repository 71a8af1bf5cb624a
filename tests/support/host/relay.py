"""A relay between machines: what a network does to connections, on demand."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Relay:
    """Passes bytes of one address on to another, late or not at all where a test says so.

    Attributes:
        delay_s: each piece is passed on so much later.
        is_cut: connections are refused, and those that are open end.
    """

    def __init__(self, address: str, target: int) -> None:
        self._target = target
        self._server = socket.create_server((address, 0))
        self.port = self._server.getsockname()[1]
        self.delay_s, self._open, self.is_cut = 0.0, set[socket.socket](), False
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        """End all connections, and refuse new ones until `mend`."""
        self.is_cut = True
        for each in list(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Take connections again."""
        self.is_cut = False

    def close(self) -> None:
        """Take none any more."""
        self.cut()
        self._server.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                if self.is_cut:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(("127.0.0.1", self._target), 10)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                for source, target in ((near, far), (far, near)):
                    self._open.add(source)
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(65_536):
                if self.delay_s:
                    time.sleep(self.delay_s)
                target.sendall(piece)
        self._open.discard(source)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
        source.close()


@contextmanager
def relayed(address: str, url: str) -> Iterator[tuple[Relay, str]]:
    """A relay to a server of this host's loopback, and the URL with the relay's address in it."""
    place, port = url.partition("127.0.0.1:")[::2]
    number = "".join(iter_digits(port))
    relay = Relay(address, int(number))
    try:
        yield relay, f"{place}{address}:{relay.port}{port[len(number) :]}"
    finally:
        relay.close()


def iter_digits(text: str) -> Iterator[str]:
    """The digits that a text begins with."""
    for character in text:
        if not character.isdigit():
            return
        yield character
