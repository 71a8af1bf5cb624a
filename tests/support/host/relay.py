"""A relay of connections from a network of machines to a server of this host's loopback."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def relayed(address: str, url: str) -> Iterator[str]:
    """The URL of a server with a relay's address in it, while that passes bytes on."""
    found = re.search(r"127\.0\.0\.1:(\d+)", url)
    assert found, url
    with socket.create_server((address, 0)) as server:
        threading.Thread(target=_serve, args=(server, int(found[1])), daemon=True).start()
        yield url.replace(found[0], f"{address}:{server.getsockname()[1]}")
        server.shutdown(socket.SHUT_RDWR)


def _serve(server: socket.socket, target: int) -> None:
    with suppress(OSError):
        while True:
            near, _ = server.accept()
            try:
                far = socket.create_connection(("127.0.0.1", target), 10)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for pair in ((near, far), (far, near)):
                threading.Thread(target=_pass, args=pair, daemon=True).start()


def _pass(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(65_536):
            target.sendall(piece)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
    source.close()
