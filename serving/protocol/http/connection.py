"""One connection: HTTP/1.1, one request at a time, each answered before the next is read.

    bytes -> head (`framing.py`) -> guard -> body -> engine -> one write
                                               '--> pages (ASGI) -> one write

A request for answers of a model goes to the engine in the turn of the event loop in which its last
byte comes. Any other is given whole to an ASGI application, whose answer is sent whole. What a
client sends ahead is kept up to a bound; then nothing more is read of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, MutableMapping
from dataclasses import dataclass
from functools import cache, lru_cache
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import unquote

from starlette.types import ASGIApp

from serving.config import MAX_BUFFERED_BYTES
from serving.errors import OverloadedError, RequestTimeoutError, ServingError
from serving.interfaces import Answer, Call, Served
from serving.protocol.answers import (
    SECURITY_HEADERS,
    encode_answer,
    encode_error,
    refusal_headers,
    served_headers,
)
from serving.protocol.front import Front, infer_target, now
from serving.protocol.http.framing import ChunkedBody, Head, SizedBody, split_head, too_large
from serving.protocol.plans import Wanted

logger = logging.getLogger(__name__)
LINGER_S = 2.0
"""Time for a refused client to read why: closing a socket with unread data drops the answer."""
MOST_AHEAD = 65_536
"""Bytes that a client may send while it is answered, before reading stops."""
MOST_PAGE_BODY = 65_536
"""Bytes of the body of a request that is not for answers of a model."""
_NOT_READ = 65_536
"""Bytes of a refused request's body that are read and thrown away to keep the connection."""
_TOLD = 100
"""Connections past the bound that get an answer saying so; further ones are closed at once."""


@dataclass(slots=True)
class Request:
    """One request, from its head on.

    Attributes:
        call: of what is asked of a model; None for a page.
        wanted: how its output is sent.
        client_id: of the request's body, sent back.
        error: why it is refused, known before its body was there.
    """

    head: Head
    request_id: str
    body: SizedBody | ChunkedBody
    call: Call | None = None
    wanted: Wanted | None = None
    client_id: str = ""
    error: ServingError | None = None


class Connections:
    """What the connections to one address share.

    Args:
        pages: ASGI application for all that is not for answers of models.
        answers_models: whether such requests are taken.

    Attributes:
        date: header of every answer.
    """

    def __init__(self, front: Front, pages: ASGIApp, answers_models: bool) -> None:
        self.front = front
        self.pages = pages
        self.answers_models = answers_models
        self.connections: set[Connection] = set()
        self.date = b""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what a connection waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Connection(asyncio.Protocol):
    """One connection of a listener."""

    def __init__(self, listener: Connections) -> None:
        self._listener = listener
        self._front = listener.front
        self._limits = listener.front.config.http
        self._transport: asyncio.Transport
        self._address = ""
        self._state: Literal["idle", "arriving", "answering", "ended"] = "idle"
        """`arriving` while a request has begun and is not whole."""
        self._since = now()
        """When `idle`, `arriving` or `ended` began."""
        self._rest = b""
        """Received, and not read."""
        self._request: Request | None = None
        """Whose head is read and whose answer is not sent."""
        self._num_held = 0
        self._is_paused = False
        self._write_paused_since: float | None = None

    # Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, unless too many are open."""
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if peer else ""
        self._listener.connections.add(self)
        most, num_open = self._limits.max_connections, len(self._listener.connections)
        if num_open > most + _TOLD:
            transport.abort()
        elif num_open > most:
            busy = f"{most} connections are open (http.max_connections)"
            self._refuse_rest(OverloadedError(busy, 1.0))

    def connection_lost(self, exc: Exception | None) -> None:
        """Mark the request under way: nobody reads its answer."""
        self._listener.connections.discard(self)
        if self._request is not None and self._request.call is not None:
            self._request.call.is_gone = True
        self._drop()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered."""
        self._write_paused_since = now()

    def resume_writing(self) -> None:
        """The client has read on."""
        self._write_paused_since = None
        self._read_on()

    def data_received(self, data: bytes) -> None:
        """Read a request, or keep the bytes until the one before it is answered."""
        if self._state == "ended":
            return
        self._rest = self._rest + data if self._rest else data
        self._advance()
        if len(self._rest) > MOST_AHEAD and self._state != "arriving":
            self._is_paused = True
            self._transport.pause_reading()

    def sweep(self, at: float) -> None:
        """Close the connection if it is past one of its times."""
        limits, waited_s = self._limits, at - self._since
        if self._transport.is_closing():  # waits until the client has read what was sent
            if waited_s > max(limits.keep_alive_s, LINGER_S) + limits.request_timeout_s:
                self._transport.abort()
        elif self._write_paused_since is not None:
            if at - self._write_paused_since > limits.request_timeout_s:
                self._transport.abort()
        elif self._state == "arriving" and waited_s > limits.request_timeout_s:
            late = f"the request did not arrive whole within {limits.request_timeout_s:g} s"
            self._refuse_rest(RequestTimeoutError(late))
        elif (self._state == "idle" and waited_s > limits.keep_alive_s) or (
            self._state == "ended" and waited_s > LINGER_S
        ):
            self._transport.close()

    def close_if_idle(self) -> None:
        """Close where no request has its head here; at the listener's end."""
        if self._request is None and self._state != "ended":
            self._transport.close()

    def abort(self) -> None:
        """End at once; what was not sent is lost."""
        self._transport.abort()

    # Reading

    def _advance(self) -> None:
        """Read as far as the bytes go, until a request is to be answered."""
        if self._state not in ("idle", "arriving") or self._write_paused_since is not None:
            return
        try:
            if self._request is not None or self._begin():
                self._read_body()
            if self._rest or self._num_held or self._state == "arriving":
                self._hold()
        except ServingError as error:
            self._refuse_rest(error)

    def _begin(self) -> bool:
        """Read a head and see who asks; False while it is not whole."""
        self._rest = self._rest.lstrip(b"\r\n")
        if not self._rest:
            return False
        if self._state == "idle":
            self._state, self._since = "arriving", now()
        split = split_head(self._rest)
        if split is None:
            return False
        head, self._rest = split
        request = self._request = self._request_of(head)
        most = MOST_PAGE_BODY if request.call is None else self._limits.max_body_bytes
        if head.length is None:
            request.body = ChunkedBody(most)
        try:
            if request.call is not None:
                self._admit(request.call, head)
            if head.length is not None and head.length > most:
                raise too_large(head.length, most)
        except Exception as error:
            request.error = _as_known(error)
        self._expect(request)
        return True

    def _request_of(self, head: Head) -> Request:
        request_id = self._front.ids.accepted(head.found.get(b"x-request-id"))
        request = Request(head, request_id, SizedBody(head.length or 0))
        if head.method == b"POST" and self._listener.answers_models:
            target = infer_target(head.target)
            if target is not None:
                model, version = target
                request.call = Call(model, {}, 0, request_id, version)
        return request

    def _admit(self, call: Call, head: Head) -> None:
        call.track = self._front.track_meant(head.found)
        principal = self._front.guard.admit(head.headers, self._address, "infer", call.model)
        call.subject = principal.subject

    def _expect(self, request: Request) -> None:
        """Tell a client that waits to send its body; refuse at once what is not worth reading."""
        head = request.head
        waits = head.found.get(b"expect", b"").lower() == b"100-continue" and not head.is_1_0
        if request.error is not None:
            if waits or head.length is None or head.length > _NOT_READ:
                raise request.error
        elif waits and head.length != 0 and not self._rest:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _read_body(self) -> None:
        request = self._request
        assert request is not None
        rest = request.body.feed(self._rest)
        self._rest = rest or b""
        if rest is None:
            return
        self._state = "answering"
        body = request.body.take()
        if request.error is not None:
            self._refuse_unseen(request, request.error)
        elif request.call is None:
            self._listener.start(self._show(request, body))
        else:
            self._infer(request, request.call, body)

    def _hold(self) -> None:
        """Count the bytes that are kept, of all connections together.

        Raises:
            OverloadedError: they are too many for one more request.
        """
        held = len(self._rest) + (self._request.body.num_bytes if self._request else 0)
        self._front.buffered += held - self._num_held
        self._num_held = held
        if self._state == "arriving" and self._front.buffered > MAX_BUFFERED_BYTES:
            raise OverloadedError("bodies being received fill the memory for them", 1.0)

    def _drop(self) -> None:
        """Forget what is kept, and the request under way; nothing more is read."""
        self._rest, self._request = b"", None
        self._state, self._since = "ended", now()
        self._hold()

    # Answers

    def _infer(self, request: Request, call: Call, body: bytes) -> None:
        """Ask the engine, or read the features of entities first."""
        try:
            found = request.head.found
            request.wanted, request.client_id = self._front.read(call, found, body)
            if call.entities is None:
                self._front.engine.submit(call, self._computed)
            else:
                self._listener.start(self._resolve(request, call))
        except Exception as error:
            self._refuse_unseen(request, error)

    async def _resolve(self, request: Request, call: Call) -> None:
        try:
            await self._front.resolve(call)
            self._front.engine.submit(call, self._computed)
        except Exception as error:
            self._refuse_unseen(request, error)

    def _refuse_unseen(self, request: Request, error: Exception) -> None:
        """Refuse what the engine has not seen; the rest it reports itself."""
        known = _as_known(error)
        if request.call is not None:
            self._front.report_refused(request.call, known)
        self._answer_error(request, known)

    def _computed(self, call: Call, outcome: Answer | ServingError) -> None:
        request = self._request
        if request is None or request.wanted is None:  # the client has gone
            return
        if isinstance(outcome, ServingError):
            self._answer_error(request, outcome)
            return
        try:
            parameters = self._front.parameters_of(call)
            body, json_bytes = encode_answer(outcome, request.wanted, request.client_id, parameters)
        except Exception as error:  # must not reach the engine: it has other calls in its hands
            self._answer_error(request, _as_known(error))
            return
        kind = _AS_JSON if json_bytes is None else _AS_BINARY % json_bytes
        request_id = b"x-request-id: %s\r\n" % request.request_id.encode()
        self._write(request, HTTPStatus.OK, kind + _served_lines(outcome.served) + request_id, body)

    async def _show(self, request: Request, body: bytes) -> None:
        """Let the pages answer."""
        sent: list[MutableMapping[str, Any]] = []
        path, _, query = request.head.target.partition(b"?")
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": request.head.method.decode(),
            "path": unquote(path.decode()),
            "query_string": query,
            "headers": request.head.headers,
            "client": (self._address, 0),
        }

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        try:
            await self._listener.pages(scope, receive, send)
        except Exception as error:
            self._answer_error(request, _as_known(error))
            return
        start, *bodies = sent
        content = b"".join([message.get("body", b"") for message in bodies])
        usual = {**dict(SECURITY_HEADERS), b"x-request-id": request.request_id.encode()}
        headers = {**usual, **dict(start["headers"])}
        self._write(request, start["status"], _lines(headers.items()), content)

    def _answer_error(self, request: Request, error: ServingError) -> None:
        lines = _lines(refusal_headers(error, request.request_id))
        self._write(request, error.status, lines, encode_error(str(error)))

    def _write(self, request: Request, status: int, lines: bytes, body: bytes) -> None:
        """Send an answer, then read on or close."""
        if self._request is not request:  # the client has gone
            return
        head = request.head
        closes = head.is_1_0 or self._front.stopping or _is_last(head)
        self._send(status, lines, body, closes, is_head=head.method == b"HEAD")
        self._request, self._state, self._since = None, "idle", now()
        if not closes:
            self._read_on()
        elif self._is_paused:
            self._linger()
        else:
            self._drop()
            self._transport.close()

    def _send(
        self, status: int, lines: bytes, body: bytes, closes: bool, is_head: bool = False
    ) -> None:
        head = b"%s%s%scontent-length: %d\r\n%s\r\n" % (
            _status_line(status),
            self._listener.date,
            lines,
            len(body),
            b"connection: close\r\n" if closes else b"",
        )
        self._transport.write(head if is_head else head + body)

    def _read_on(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        if self._rest:  # in a turn of its own: many requests that were sent ahead are no recursion
            asyncio.get_running_loop().call_soon(self._advance)

    def _refuse_rest(self, error: ServingError) -> None:
        """Answer what cannot be read any further, and close."""
        request = self._request
        if request is not None and request.call is not None:
            self._front.report_refused(request.call, error)
        lines = _lines(refusal_headers(error, request.request_id if request else ""))
        self._send(error.status, lines, encode_error(str(error)), closes=True)
        self._linger()

    def _linger(self) -> None:
        """Send nothing more, and throw away what comes."""
        self._drop()
        self._read_on()
        if self._transport.can_write_eof():
            self._transport.write_eof()


_AS_JSON = b"content-type: application/json\r\n"
_AS_BINARY = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"


def _as_known(error: Exception) -> ServingError:
    """What a client is told of an error; of a fault of ours, no more than that it was one."""
    if isinstance(error, ServingError):
        return error
    logger.error("a request could not be taken", exc_info=error)
    return ServingError("this server has failed on the request")


def _is_last(head: Head) -> bool:
    words = head.found.get(b"connection", b"")
    return words != b"" and b"close" in [word.strip().lower() for word in words.split(b",")]


def _lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """All but the length, which is that of what is sent."""
    return b"".join([b"%s: %s\r\n" % pair for pair in headers if pair[0] != b"content-length"])


@lru_cache(256)
def _served_lines(served: Served) -> bytes:
    return _lines([*SECURITY_HEADERS, *served_headers(served)])


@cache
def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status:d} {HTTPStatus(status).phrase}\r\n".encode()
