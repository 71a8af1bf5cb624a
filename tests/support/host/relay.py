"""Relays of connections between machines and servers.

As a program, with PORT HOST PORT: from this machine's loopback to a server elsewhere, as a tunnel.
"""

import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product

NOTICES = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_USER_TIMEOUT: 10_000}


@contextmanager
def relayed(address: str, url: str) -> Iterator[str]:
    """The URL of a server with a relay's address in it, while that passes bytes on."""
    found = re.search(r"127\.0\.0\.1:(\d+)", url)
    assert found, url
    with balanced(address, ("127.0.0.1", int(found[1]))) as port:
        yield url.replace(found[0], f"{address}:{port}")


@contextmanager
def balanced(address: str, *targets: tuple[str, int]) -> Iterator[int]:
    """The port of a relay to the first of these servers that takes a connection."""
    with socket.create_server((address, 0)) as server:
        threading.Thread(target=_serve, args=(server, targets), daemon=True).start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)


def _serve(server: socket.socket, targets: tuple[tuple[str, int], ...]) -> None:
    with suppress(OSError):
        while True:
            near, _ = server.accept()
            threading.Thread(target=_reach, args=(near, targets), daemon=True).start()


def _reach(near: socket.socket, targets: tuple[tuple[str, int], ...]) -> None:
    for target in targets:
        with suppress(OSError):
            far = socket.create_connection(target, 4)
            break
    else:
        near.close()
        return
    far.settimeout(None)
    # As a balancer that ends its sessions with what is down: here with one that hears nothing.
    for end, (option, value) in product((near, far), NOTICES.items()):
        end.setsockopt(socket.IPPROTO_TCP, option, value)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for pair in ((near, far), (far, near)):
        threading.Thread(target=_pass, args=pair, daemon=True).start()


def _pass(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(65_536):
            target.sendall(piece)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
    source.close()


if __name__ == "__main__":
    here, host, there = sys.argv[1:]
    _serve(socket.create_server(("127.0.0.1", int(here))), ((host, int(there)),))
