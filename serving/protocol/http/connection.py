"""Bounds of a connection that stock uvicorn does not have, around its own HTTP parsers.

uvicorn has no deadline for the head of a request and no bound on its size, none for a client that
does not read, and none on connections. They are kept here, on the bytes, before uvicorn parses
them. Bodies are bounded where they are read (`request.py`).

httptools parses a request whose body has a known length. It ends a request that has the header
`Upgrade` at its head, and lets trailers change the headers; so a connection that sends either
header is parsed by h11 from then on.
"""

from __future__ import annotations

import asyncio
import logging
import re
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.calls import Call
from serving.config import HttpConfig
from serving.errors import (
    BadRequestError,
    HeadersTooLargeError,
    OverloadedError,
    RequestTimeoutError,
    ServingError,
)
from serving.protocol.answers import encode_error
from serving.protocol.front import now

logger = logging.getLogger(__name__)
LINGER_S = 2.0
"""Time for a refused client to read why: closing a socket with unread data drops the answer."""
MOST_UNREAD = 2**20
"""Bytes that may arrive while nothing reads them, such as headers behind a chunked body."""
_FOLDED = re.compile(rb"\n[ \t]")
NEEDS_H11 = re.compile(rb"\n(?:transfer-encoding|upgrade)[ \t]*:", re.IGNORECASE)


class BoundedConnection(asyncio.Protocol):
    """One connection.

    Args:
        limits: bounds.
        connections: all that are open.
        uvicorn: what uvicorn gives to its own protocols.

    Attributes:
        call: of the request that is being answered; marked when the client goes.
        is_strict: whether h11 parses it.
    """

    def __init__(
        self,
        limits: HttpConfig,
        connections: set[BoundedConnection],
        app_state: dict[str, Any],
        **uvicorn: Any,
    ) -> None:
        self._limits = limits
        self._connections = connections
        self._uvicorn = {**uvicorn, "app_state": {**app_state, "connection": self}}
        self._transport: asyncio.Transport
        self._parser: HttpToolsProtocol | H11Protocol | None = None
        self._head = b""
        self._in_head = True
        self._is_answering = False
        self._num_unread = 0
        self._since = now()
        """When the connection fell idle, or the head began that is being read."""
        self._write_paused_since: float | None = None
        self._refused_since: float | None = None
        self.call: Call | None = None

    @property
    def is_strict(self) -> bool:  # noqa: D102
        return isinstance(self._parser, H11Protocol)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, unless too many are open."""
        self._transport = transport
        self._connections.add(self)
        self._parse_with(HttpToolsProtocol)
        most = self._limits.max_connections
        if len(self._connections) > most:
            self.refuse(OverloadedError(f"{most} connections are open (http.max_connections)", 1.0))

    def connection_lost(self, exc: Exception | None) -> None:
        """Mark the request under way: nobody reads its answer."""
        self._connections.discard(self)
        if self.call is not None:
            self.call.is_gone = True
        assert self._parser is not None
        self._parser.connection_lost(exc)

    def eof_received(self) -> None:
        """A client that sends no more is gone."""

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered."""
        self._write_paused_since = now()
        assert self._parser is not None
        self._parser.pause_writing()

    def resume_writing(self) -> None:
        """The client has read its answers."""
        self._write_paused_since = None
        assert self._parser is not None
        self._parser.resume_writing()

    def data_received(self, data: bytes) -> None:
        """Pass bytes to the parser; those of a head once it is whole."""
        if self._refused_since is not None:
            return
        if self._in_head:
            if not self._head:
                self._since = now()
            self._head += data
            if not _is_whole(self._head):
                if len(self._head) > self._limits.max_header_bytes:
                    self.refuse(headers_too_large(self._limits))
                return
            data, self._head, self._in_head = self._head, b"", False
            end = data.find(b"\r\n\r\n")
            if NEEDS_H11.search(data, 0, end if end > 0 else len(data)):
                if _FOLDED.search(data, 0, end):
                    self.refuse(BadRequestError("a header goes over several lines"))
                    return
                if not self.is_strict:
                    self._parse_with(H11Protocol)
        self._num_unread += len(data)
        if self._num_unread > max(MOST_UNREAD, len(data)):
            self._transport.abort()
            return
        assert self._parser is not None
        try:
            self._parser.data_received(data)
        except h11.LocalProtocolError:  # what follows an answer is no HTTP
            self._transport.abort()

    # What the application reports

    def begin(self) -> None:
        """A request's head was parsed."""
        self._in_head, self._is_answering = False, True
        self._num_unread = 0

    def progress(self) -> None:
        """A part of its body was read."""
        self._num_unread = 0

    def end(self) -> None:
        """It is answered, and its body was read to the end."""
        self.call = None
        self._in_head, self._is_answering = True, False
        self._since = now()

    def close(self) -> None:
        """No more requests, once what was written is sent."""
        self._transport.close()

    def abort(self) -> None:
        """End at once; what was not sent is lost."""
        self._transport.abort()

    def sweep(self, at: float) -> None:
        """Close the connection if it is past one of its times; called twice a second."""
        limits = self._limits
        if self._write_paused_since is not None:
            if at - self._write_paused_since > limits.write_timeout_s:
                self._transport.abort()
        elif self._refused_since is not None:
            if at - self._refused_since > LINGER_S:
                self._transport.close()
        elif self._is_answering:
            return
        elif self._head or not self._in_head:
            if at - self._since > limits.request_timeout_s:
                self.refuse(arrives_late(limits))
        elif at - self._since > limits.keep_alive_s:
            self._transport.close()

    def refuse(self, error: ServingError) -> None:
        """Answer what cannot be read any further, and close."""
        body = encode_error(str(error))
        status = HTTPStatus(error.status)
        retry = "" if error.retry_after_s is None else f"retry-after: {error.retry_after_s:.0f}\r\n"
        self._transport.write(
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n{retry}"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            + body
        )
        self._refused_since = now()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _parse_with(self, kind: type[HttpToolsProtocol | H11Protocol]) -> None:
        if self._parser is not None:
            self._parser.connections.discard(self._parser)
            if self._parser.timeout_keep_alive_task is not None:
                self._parser.timeout_keep_alive_task.cancel()
        self._parser = kind(**self._uvicorn)
        self._parser.connection_made(self._transport)


def headers_too_large(limits: HttpConfig) -> HeadersTooLargeError:
    """Why a head is refused."""
    return HeadersTooLargeError(
        f"this server takes a request line and headers of {limits.max_header_bytes} bytes and "
        f"{limits.max_headers} headers at most (http.max_header_bytes, http.max_headers)"
    )


def arrives_late(limits: HttpConfig) -> RequestTimeoutError:
    """Why a request is refused that does not arrive."""
    return RequestTimeoutError(
        f"the request did not arrive whole within {limits.request_timeout_s:g} s"
    )


def sweep(connections: set[BoundedConnection], at: float) -> None:
    """Close connections that are past one of their times.

    A fault of ours in one of them closes that one alone.
    """
    for connection in list(connections):
        try:
            connection.sweep(at)
        except Exception:
            logger.exception("a connection could not be swept; it is closed")
            connection.abort()


def _is_whole(head: bytes) -> bool:
    """Whether a parser should see these bytes: a head, or what is none and never will be."""
    head = head.lstrip(b"\r\n")
    return bool(head) and (b"\r\n\r\n" in head or b"\n\n" in head or not head[:1].isupper())
