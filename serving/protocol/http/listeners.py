"""Listeners of a serving process on uvicorn, one event loop for all of them."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Generator
from typing import Any

from uvicorn.config import Config
from uvicorn.server import Server

from serving.protocol.http.connection import InferProtocol, sweep
from serving.protocol.http.inferring import Front, now
from tasks.kernel.errors import ConfigurationError

_TICKS_A_SWEEP = 5
"""uvicorn ticks ten times a second."""


class Listener(Server):
    """One listener. Signals are the process's business, not its."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Look after connections twice a second."""
        if counter % _TICKS_A_SWEEP == 0:
            sweep(list(self.server_state.connections), now())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, answer what is in flight, then close."""
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.close()


def public_listener(
    front: Front,
    application: Callable[..., Any],
    tls: ssl.SSLContext | None = None,
) -> Listener:
    """The listener that clients and the edge come to."""
    protocol = type("PublicConnection", (InferProtocol,), {"front": front})
    return Listener(_config(application, protocol, front.config.stop_s, tls))


def admin_listener(application: Callable[..., Any], stop_s: float) -> Listener:
    """The listener on loopback that only who holds the token can use."""
    # Not httptools: it takes a body behind `Upgrade` for the next request.
    return Listener(_config(application, "h11", stop_s, None))


def bound_socket(host: str, port: int, what: str) -> socket.socket:
    """A socket that listens on an address; port 0 takes a free one.

    Raises:
        ConfigurationError: it cannot, for the port is taken or the address not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # At once: a port that is bound and not listened to can be taken by a second process.
        listener.listen(2048)
    except OSError as exc:
        listener.close()
        raise ConfigurationError(
            f"{what} cannot listen on {host}:{port}: {exc.strerror or exc}. End what has the "
            "port, or name another one (0 takes a free one). Nothing was started"
        ) from exc
    listener.setblocking(False)
    return listener


def _config(
    application: Callable[..., Any],
    protocol: Any,
    stop_s: float,
    tls: ssl.SSLContext | None,
) -> Config:
    return Config(
        application,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(stop_s)),
        ssl_context_factory=None if tls is None else (lambda config, default: tls),
    )
