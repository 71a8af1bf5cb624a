"""Listeners: the public one and the one of the admin interface, on one event loop."""

import asyncio
import logging
import socket
from contextlib import suppress
from email.utils import formatdate

from starlette.types import ASGIApp

from serving.protocol.front import Front, now
from serving.protocol.http.connection import Connection, Connections
from serving.protocol.http.pages import PublicPages
from serving.security.tls import RenewingTls
from tasks.kernel.errors import ConfigurationError

logger = logging.getLogger(__name__)
SWEEP_S = 0.5
LOOK_S = 5.0
"""Between two looks at the TLS files."""
LAST_WAIT_S = 0.25
"""An idle connection may have a request on its way when the process ends; it is still answered."""
_BACKLOG = 2048


class Listener(Connections):
    """Connections to one address, and their end; see `Connections`.

    Attributes:
        started: whether it takes connections.
    """

    def __init__(
        self, front: Front, pages: ASGIApp, answers_models: bool, tls: RenewingTls | None = None
    ) -> None:
        super().__init__(front, pages, answers_models)
        self.started = False
        self._tls = tls
        self._looked_at = now()
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Let `serve` answer what is in flight, and end."""
        self._stopped.set()

    async def serve(self, sock: socket.socket) -> None:
        """Listen until `stop`; requests in flight then have `stop_s` to be answered."""
        loop = asyncio.get_running_loop()
        self._sweep()
        timeout_s = self.front.config.http.request_timeout_s if self._tls else None
        server = await loop.create_server(
            lambda: Connection(self),
            sock=sock,
            ssl=self._tls.context if self._tls else None,
            backlog=_BACKLOG,
            ssl_handshake_timeout=timeout_s,
        )
        self.started = True
        try:
            while not self._stopped.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), SWEEP_S)
                self._sweep()
                self._look()
            await asyncio.sleep(LAST_WAIT_S)
        finally:
            server.close()
            await self._end()

    def _look(self) -> None:
        """Take renewed TLS files into use; a fault in that does not end the listener."""
        if self._tls is None or now() < self._looked_at + LOOK_S:
            return
        self._looked_at = now()
        try:
            self._tls.look()
        except Exception:
            logger.exception("the TLS files could not be looked at; they stay as they were")

    async def _end(self) -> None:
        until = now() + self.front.config.stop_s
        while self.connections and now() < until:
            for connection in list(self.connections):
                connection.close_if_idle()
            self._sweep()
            await asyncio.sleep(0.02)
        for connection in list(self.connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    def _sweep(self) -> None:
        """Close connections that are past one of their times; a fault in one ends that alone."""
        self.date = b"date: %s\r\n" % formatdate(usegmt=True).encode()
        for connection in list(self.connections):
            try:
                connection.sweep(now())
            except Exception:
                logger.exception("a connection could not be swept; it is closed")
                connection.transport.abort()


def public_listener(front: Front, tls: RenewingTls | None = None) -> Listener:
    """The listener that clients and the gateway come to."""
    return Listener(front, PublicPages(front).application(), True, tls)


def admin_listener(front: Front, pages: ASGIApp) -> Listener:
    """The listener on loopback that only who holds the token can use."""
    return Listener(front, pages, False)


def bound_socket(host: str, port: int, what: str) -> socket.socket:
    """A socket that listens on an address; port 0 takes a free one.

    Raises:
        ConfigurationError: it cannot, for the port is taken or the address not of this machine.
    """
    is_6 = ":" in host
    family = socket.AF_INET6 if is_6 else socket.AF_INET
    try:
        # Listens at once: a port that is only bound can be taken by a second process.
        listener = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_6
        )
    except OSError as exc:
        raise ConfigurationError(
            f"{what} cannot listen on {host}:{port}: {exc.strerror or exc}. End what has the "
            "port, or name another one (0 takes a free one). Nothing was started"
        ) from exc
    listener.setblocking(False)
    return listener
