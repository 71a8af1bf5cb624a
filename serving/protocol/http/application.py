"""The public listener: requests for answers of a model, and everything else as pages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from uvicorn.config import Config
from uvicorn.server import Server

from serving.calls import Answer, Call
from serving.errors import ClientGoneError, ServingError
from serving.protocol.answers import encode_answer
from serving.protocol.front import Asked, Front, Target, now
from serving.protocol.http.connection import BoundedConnection, sweep
from serving.protocol.http.pages import PublicPages
from serving.protocol.http.request import (
    JSON,
    SECURITY_HEADERS,
    Headers,
    HttpRequest,
    Message,
    Receive,
    Send,
    served_headers,
)
from tasks.kernel.errors import ConfigurationError

logger = logging.getLogger(__name__)
_TICKS_A_SWEEP = 5
"""uvicorn ticks ten times a second."""
LAST_WAIT_S = 0.25
"""An idle connection may have a request on its way when the process ends; it is still answered."""


class PublicApplication:
    """ASGI application of the public listener."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._pages = PublicPages(front).application()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = HttpRequest(self._front, scope, receive, send)
        request.connection.begin()
        try:
            await self._answer(request, scope)
        except ClientGoneError:
            logger.debug("a client left before its request was whole")
        finally:
            request.release()
            request.connection.end()

    async def _answer(self, request: HttpRequest, scope: Message) -> None:
        try:
            request.check_head()
        except ServingError as error:
            await request.refuse(error)
            return
        target = self._front.target_of(scope["raw_path"]) if scope["method"] == "POST" else None
        if target is None:
            await self._show_page(request, scope)
        else:
            await self._infer(request, target)

    async def _infer(self, request: HttpRequest, target: Target) -> None:
        front = self._front
        call = Call(target.model, {}, 0, request.request_id, target.version)
        call.slot = front.slot_meant(request.found)
        is_submitted = False
        try:
            call.subject = front.guard.admit(
                request.headers, request.address, "infer", target.model
            ).subject
            body = await request.body()
            asked = front.read(
                target, request.found, body, call.subject, call.request_id, call.arrived
            )
            call = request.connection.call = asked.call
            if call.entities is not None:
                await front.resolve(call)
            is_submitted = True
            answer = await front.computed(call)
            headers, content = _written(front, request, asked, answer)
        except ClientGoneError:
            raise
        except ServingError as error:
            await self._refuse(request, call, error, is_submitted)
        except Exception:
            logger.exception("a request to %s could not be taken", target.model)
            fault = ServingError("this server has failed on the request")
            await self._refuse(request, call, fault, is_submitted)
        else:
            await request.answer(200, headers, content)

    async def _refuse(
        self, request: HttpRequest, call: Call, error: ServingError, is_submitted: bool
    ) -> None:
        if not is_submitted:  # else the engine has reported it
            self._front.report_refused(call, error)
        await request.refuse(error)

    async def _show_page(self, request: HttpRequest, scope: Message) -> None:
        """Let Starlette answer, within the bounds that requests for answers have."""
        sent: list[Message] = []

        async def collect(message: Message) -> None:
            sent.append(message)

        try:
            await self._pages(scope, request.receive, collect)
        except Exception:
            logger.exception("a page could not be shown")
            await request.refuse(ServingError("this server has failed on the request"))
            return
        start, *bodies = sent
        headers = [pair for pair in start["headers"] if pair[0] != b"content-length"]
        content = b"".join(message.get("body", b"") for message in bodies)
        await request.answer(start["status"], headers, content)


def _written(
    front: Front, request: HttpRequest, asked: Asked, answer: Answer
) -> tuple[Headers, bytes]:
    """Headers and body of an answer."""
    parameters = front.parameters_of(asked.call)
    body, json_bytes = encode_answer(answer, asked.wanted, asked.client_id, parameters)
    headers = [JSON]
    if json_bytes is not None:
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"inference-header-content-length", b"%d" % json_bytes),
        ]
    request_id = (b"x-request-id", request.request_id.encode())
    return [*headers, *SECURITY_HEADERS, *served_headers(answer.served), request_id], body


class Listener(Server):
    """A listener on uvicorn. Signals are the process's business, not its."""

    connections: set[BoundedConnection]

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Sweep the connections twice a second."""
        if counter % _TICKS_A_SWEEP == 0:
            sweep(self.connections, now())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, answer what is in flight, then close."""
        await asyncio.sleep(LAST_WAIT_S)
        await super().shutdown(sockets)
        for connection in list(self.connections):
            connection.close()


def public_listener(front: Front, tls: ssl.SSLContext | None = None) -> Listener:
    """The listener that clients and the gateway come to."""
    connections: set[BoundedConnection] = set()
    protocol = partial(BoundedConnection, front.config.http, connections)
    http = front.config.http
    return _listener(
        PublicApplication(front),
        front.config.stop_s,
        connections,
        http=protocol,
        timeout_keep_alive=math.ceil(http.keep_alive_s),
        h11_max_incomplete_event_size=http.max_header_bytes,
        ssl_context_factory=None if tls is None else (lambda config, default: tls),
    )


def admin_listener(application: Callable[..., Any], stop_s: float) -> Listener:
    """The listener on loopback that only who holds the token can use."""
    # Not httptools: it takes a body behind `Upgrade` for the next request.
    return _listener(application, stop_s, set(), http="h11")


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


def _listener(
    application: Callable[..., Any],
    stop_s: float,
    connections: set[BoundedConnection],
    **options: Any,
) -> Listener:
    config = Config(
        application,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(stop_s)),
        **options,
    )
    made = Listener(config)
    made.connections = connections
    return made
