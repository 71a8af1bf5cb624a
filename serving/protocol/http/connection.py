"""A connection of the public listener: infer requests go straight to the engine.

Everything else goes on to an ASGI application, as in uvicorn, whose protocol this is. What is
ours beside the short way: limits on headers, bodies and connections, time-outs for requests that
do not arrive and for answers that nobody reads, and pipelined requests that keep their order
whichever way they go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from serving.errors import (
    BadRequestError,
    OverloadedError,
    ServingError,
)
from serving.protocol.answers import encode_error
from serving.protocol.http.errors import HeadersTooLargeError, RequestTimeoutError
from serving.protocol.http.exchange import Exchange, too_large
from serving.protocol.http.framing import check_head, parser_of_body
from serving.protocol.http.heads import refused
from serving.protocol.http.inferring import READ_HEADERS, Front, Target, now

_log = logging.getLogger(__name__)
_NOT_READ = 65_536
"""Bytes of a body that are read and thrown away to keep a refused client's connection."""


_MOST_PIPELINED = 16
"""Requests behind the one that is being answered, before reading stops."""
_LAST_WAIT_S = 0.25
"""How long an idle connection may bring a last request when the process ends."""
_LINGER_S = 2.0
"""Time for a client that was refused in the middle of its request to read why."""


class InferProtocol(HttpToolsProtocol):
    """One connection. `front` is set by the listener's own subclass."""

    front: Front

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.address = ""
        self.found: dict[bytes, bytes] = {}
        self.head: Exchange | RequestResponseCycle | None = None
        """The request that is answered next; those behind it are in `pipeline`."""
        self.reading_headers = False
        self.reading = False
        self.deaf = False
        """Set once nothing more is read of this connection."""
        self.closing = False
        self.last_has_begun = False
        """Whether the process ends and this connection's last request is being read or answered."""
        self.header_bytes = 0
        """Of the request whose headers are being read, up to the last piece that was received."""
        self.num_fed = 0
        """Bytes of that piece."""
        self.in_trailer = self.has_body = False
        """Whether a chunk was begun and nothing of it came, as after the last one; and whether the
        last piece had a part of a body in it."""
        self.piece_is_used = self.shares_piece = False
        """Whether that piece has another request in it, and whether that is before this one."""
        self.since = now()
        """When the connection fell idle, or the request that is being read began."""
        self.write_paused_since: float | None = None
        self.lingering_since: float | None = None

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, unless there are too many."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        most = self.front.config.http.max_connections
        if len(self.connections) > most:
            self._refuse_connection(
                OverloadedError(f"{most} connections are open (http.max_connections)", 1.0)
            )
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell everything under way that nobody waits any more."""
        self.connections.discard(self)
        self.deaf = True
        waiting = [cycle for cycle, _ in self.pipeline]
        for cycle in {
            id(c): c for c in (self.head, self.cycle, *waiting) if c is not None
        }.values():
            if isinstance(cycle, Exchange):
                cycle.gone()
            else:
                cycle.disconnected |= not cycle.response_complete
                cycle.message_event.set()
        self.pipeline.clear()
        if self.flow is not None:
            self.flow.resume_writing()
        if exc is None:
            self.transport.close()
        self.parser = None  # type: ignore[assignment]

    def shutdown(self) -> None:
        """Answer what has been asked, then close; called when the process ends."""
        self.closing = True
        if self._is_idle():
            # A request may be on its way: closed now, it would be lost without a word.
            self.loop.call_later(_LAST_WAIT_S, self.loop.call_later, 0, self._close_if_idle)
            return
        self.last_has_begun = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _close_if_idle(self) -> None:
        if self._is_idle() and not self.transport.is_closing():
            self.transport.close()

    def sweep(self, at: float) -> None:
        """Close the connection if it is past one of its times; called about every second."""
        http = self.front.config.http
        if self.write_paused_since is not None:
            if at - self.write_paused_since > http.write_timeout_s:
                self.transport.abort()
        elif self.lingering_since is not None:
            if at - self.lingering_since > _LINGER_S:
                self.transport.close()
        elif self.deaf or self.transport.is_closing():
            return
        elif self.reading:
            if not self.flow.read_paused and at - self.since > http.request_timeout_s:
                self._refuse_rest(
                    RequestTimeoutError(
                        f"the request did not arrive whole within {http.request_timeout_s:g} s"
                    )
                )
        elif self._is_idle() and at - self.since > http.keep_alive_s:
            self.transport.close()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered."""
        super().pause_writing()
        self.write_paused_since = now()
        self.flow.pause_reading()

    def resume_writing(self) -> None:
        """The client has read on."""
        super().resume_writing()
        self.write_paused_since = None
        if self.head is None:
            self._next()

    def _is_idle(self) -> bool:
        return self.head is None and not self.pipeline and not self._is_body_awaited()

    def _is_body_awaited(self) -> bool:
        return self.reading and not self.reading_headers

    # Parsing

    def data_received(self, data: bytes) -> None:
        """Feed the parser, whose callbacks are below."""
        if self.deaf:
            return
        self.num_fed = len(data)
        self.piece_is_used, self.shares_piece = self.reading, False
        was_in_trailer, self.has_body = self.in_trailer, False
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError as exc:
            _log.error("a request could not be taken", exc_info=exc.__context__ or exc)
            self.transport.abort()
        except httptools.HttpParserError as exc:
            self._refuse_rest(BadRequestError(f"the request is no HTTP: {exc}"))
        if self.reading_headers and not self.deaf:
            # Of a piece that many pipelined requests share, what the last one has of it.
            self._count_header_bytes(self._num_header_bytes() if self.shares_piece else len(data))
        elif was_in_trailer and self.in_trailer and not self.has_body and not self.deaf:
            self._count_header_bytes(len(data))

    def _feed(self, data: bytes) -> None:
        """No other protocol is spoken here: who asks for one is answered, and so is what follows.

        Raises:
            HttpParserError: it is no HTTP.
        """
        while not self.deaf:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as exc:
                data = data[exc.args[0] :]
                if self.reading and not self.deaf:
                    self.parser = parser_of_body(self, self.headers, self.cycle.keep_alive)
            else:
                return

    def _count_header_bytes(self, num_bytes: int) -> None:
        self.header_bytes += num_bytes
        most = self.front.config.http.max_header_bytes
        if self.header_bytes > most:
            self._refuse_rest(
                HeadersTooLargeError(
                    f"request line and headers have more than {most} bytes (http.max_header_bytes)"
                )
            )

    def on_message_begin(self) -> None:
        """Start to read a request."""
        self.url = b""
        self.headers = []
        self.found = {}
        self.expect_100_continue = False
        self.reading_headers = self.reading = True
        self.in_trailer = False
        self.header_bytes = 0
        self.piece_is_used, self.shares_piece = True, self.piece_is_used
        self.since = now()
        if self.closing and self.last_has_begun:
            self._hear_no_more()
        self.last_has_begun = self.closing

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; those behind a body are not wanted: they come after all checks."""
        if not self.reading_headers:
            self._count_header_bytes(len(name) + len(value) + 4)
            return
        name = name.lower()
        self.headers.append((name, value))
        if name in READ_HEADERS:
            self.found[name] = value
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True

    def on_headers_complete(self) -> None:
        """Send the request one of the two ways."""
        self.reading_headers = False
        if self.deaf:
            return
        try:
            self._check_size_of_head()
            check_head(self.headers, self.parser.get_http_version())
        except ServingError as exc:
            self._refuse_rest(exc)
            return
        target = self.front.target_of(self.url) if self.parser.get_method() == b"POST" else None
        if target is not None:
            self._begin(target)
        elif _is_path(self.url):
            self._to_application()
        else:
            self._refuse_rest(BadRequestError("the request's target is no path"))

    def _check_size_of_head(self) -> None:
        http = self.front.config.http
        if len(self.headers) > http.max_headers or (
            # No more than has been received: mostly that alone says enough.
            self.header_bytes + self.num_fed > http.max_header_bytes
            and self._num_header_bytes() > http.max_header_bytes
        ):
            raise HeadersTooLargeError(
                f"the request has {len(self.headers)} headers; this server takes "
                f"{http.max_headers}, of {http.max_header_bytes} bytes together"
            )

    def _num_header_bytes(self) -> int:
        return len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])

    def on_chunk_header(self) -> None:
        """A chunk begins; nothing of a body follows the last one, but headers may."""
        self.in_trailer = True

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self.in_trailer, self.has_body = False, True
        cycle = self.cycle
        if self.deaf:
            return
        if not isinstance(cycle, Exchange):
            super().on_body(body)
            return
        if not cycle.add(body):
            assert cycle.error is not None
            self._refuse_rest(cycle.error)
        elif self.front.buffered > self.front.config.http.max_buffered_bytes:
            self._refuse_rest(
                OverloadedError("bodies being received fill http.max_buffered_bytes", 1.0)
            )

    def on_message_complete(self) -> None:
        """A request is whole: start it if it is the next one."""
        if self.parser.should_upgrade() and self._length():
            return  # not whole: its body comes by another parser
        self.reading = self.in_trailer = False
        cycle = self.cycle
        if self.deaf:
            return
        if not isinstance(cycle, Exchange):
            cycle.more_body = False  # also where the answer did not wait for it
            super().on_message_complete()
            return
        cycle.complete = True
        if cycle is self.head:
            cycle.start()

    # The short way

    def _begin(self, target: Target) -> None:
        keep_alive = (
            not self.closing
            and self.parser.should_keep_alive()
            and self.parser.get_http_version() != "1.0"
        )
        exchange = Exchange(self, self.front, target, self.found, keep_alive)
        exchange.expects_continue = self.expect_100_continue
        self.cycle = exchange  # type: ignore[assignment]
        self._admit(exchange)
        if self.head is None and not self.pipeline and self.write_paused_since is None:
            self._lead(exchange)
        else:
            self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]
            self._bound_pipeline()
        if exchange.error is not None and (exchange.expects_continue or self._length() > _NOT_READ):
            # Who waits to be told to go on sends no body: its refusal cannot wait for one.
            self._hear_no_more()
            exchange.keep_alive = False
            exchange.complete = True
            if exchange is self.head:
                exchange.start()

    def _admit(self, exchange: Exchange) -> None:
        length = self._length()
        most = self.front.config.http.max_body_bytes
        try:
            if length > most and b"transfer-encoding" not in self.found:
                raise too_large(length, most)
            principal = self.front.guard.admit(
                self.headers, self.address, "infer", exchange.target.model
            )
            exchange.subject = principal.subject
        except ServingError as exc:
            exchange.error = exc

    def _bound_pipeline(self) -> None:
        """Stop reading behind many requests; not behind few, for a client's end is read too."""
        if len(self.pipeline) >= _MOST_PIPELINED or self.write_paused_since is not None:
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()

    def _length(self) -> int:
        """Bytes of the body; of a chunked one, which does not say, more than is thrown away."""
        if b"transfer-encoding" in self.found:
            return _NOT_READ + 1
        return int(self.found.get(b"content-length", b"0"))

    def _lead(self, exchange: Exchange) -> None:
        self.head = exchange
        if exchange.expects_continue and not exchange.complete and exchange.error is None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def answer(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        """Write an answer, and go on with what waits behind it."""
        if exchange.disconnected or exchange.response_complete:
            return
        exchange.response_complete = True
        self.transport.write(head + body)
        self.server_state.total_requests += 1
        self.head = None
        if exchange.keep_alive:
            self._next()
        else:
            self._close()

    def date(self) -> list[tuple[bytes, bytes]]:
        """Headers that every answer of the server has."""
        return self.server_state.default_headers

    def resolve(self, exchange: Exchange) -> None:
        """Read features for a request by entities, as a task of the server."""
        task = self.loop.create_task(exchange.resolve())
        task.add_done_callback(self._resolved)
        self.tasks.add(task)

    def _resolved(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            _log.error("features of a request could not be read", exc_info=exc)
            if isinstance(self.head, Exchange):
                self.head.refuse(ServingError("this server has failed to read features"))

    # The long way

    def _to_application(self) -> None:
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        self.headers.extend(headers)
        super().on_headers_complete()
        if self.closing:
            self.cycle.keep_alive = False
        if self.pipeline:
            self._bound_pipeline()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self.head = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """An ASGI answer is written: go on with what waits behind it."""
        self.server_state.total_requests += 1
        self.head = None
        if not self.transport.is_closing():
            self._next()

    def _next(self) -> None:
        """Start the next request, or wait for one."""
        if self.write_paused_since is not None:
            return
        if not self.pipeline:
            self.flow.resume_reading()
            if not self.reading:
                self.since = now()
            if self.closing and self._is_idle():
                self.transport.close()
            return
        cycle, app = self.pipeline.pop()
        self._bound_pipeline()
        if not isinstance(cycle, Exchange):
            self._start_asgi_task(cycle, app)
            return
        self._lead(cycle)
        if cycle.complete:
            # In a turn of its own: a long pipeline of refusals is no recursion.
            self.loop.call_soon(cycle.start)
        else:
            self.since = now()

    # Refusals that end the connection

    def _refuse_rest(self, error: ServingError) -> None:
        """Answer what cannot be read any further, after all that came before it, and close."""
        if self.deaf:
            return
        self._hear_no_more()
        last = self.cycle
        if isinstance(last, RequestResponseCycle) and last.more_body:
            if last.response_complete:
                # Answered before its body was there: a second answer would be taken for the next's.
                self._close()
                return
            self._give_up(last)
        if isinstance(last, Exchange) and not last.complete:
            last.error = error
            last.complete, last.keep_alive = True, False
            if last is self.head:
                last.start()
        elif self.head is None and not self.pipeline:
            self._refuse_connection(error)
        else:
            exchange = Exchange(self, self.front, Target("", None), {}, False)
            exchange.error, exchange.complete = error, True
            self.cycle = exchange  # type: ignore[assignment]
            self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]

    def _refuse_connection(self, error: ServingError) -> None:
        self._hear_no_more()
        body = encode_error(str(error))
        self.transport.write(refused(error, self.date(), "", len(body), False) + body)
        self._close()

    def _give_up(self, cycle: RequestResponseCycle) -> None:
        """The application waits for a body that will not come: let it go, and answer for it."""
        cycle.disconnected = True
        cycle.message_event.set()
        if self.head is cycle:
            self.head = None
        else:
            self.pipeline.popleft()

    def _hear_no_more(self) -> None:
        self.deaf = True
        self.reading = self.reading_headers = False
        self.flow.resume_reading()  # what comes is thrown away

    def _close(self) -> None:
        """Close once the answer is out.

        Where the client may still be sending, it gets a moment to read: closing a socket with
        unread data makes the kernel throw the answer away too.
        """
        if not self.deaf:
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.lingering_since = now()


def _is_path(url: bytes) -> bool:
    if not url.startswith(b"/") or not url.isascii():
        return False
    try:
        found = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        return False
    return found.path is not None and found.fragment is None


def sweep(connections: Sequence[object], at: float) -> None:
    """Close connections that are past one of their times."""
    for connection in connections:
        if not isinstance(connection, InferProtocol):
            continue
        try:
            connection.sweep(at)
        except Exception:
            # A fault of ours costs this connection; let through, it would end the listener.
            _log.exception("a connection could not be looked after")
            connection.transport.abort()
