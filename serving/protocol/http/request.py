"""One request of the public listener: its head, checked; its body, bounded; its one answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Any

from serving.calls import SERVED_HEADERS, Served
from serving.errors import (
    BadRequestError,
    ClientGoneError,
    OverloadedError,
    ServingError,
    TooLargeError,
)
from serving.protocol.answers import encode_error
from serving.protocol.front import Front
from serving.protocol.http.connection import (
    LINGER_S,
    BoundedConnection,
    arrives_late,
    headers_too_large,
)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
JSON = (b"content-type", b"application/json")
SECURITY_HEADERS = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
_NOT_READ = 65_536
"""Bytes of a body that are read and thrown away to keep a refused client's connection."""


class HttpRequest:
    """A request as ASGI gives it."""

    def __init__(self, front: Front, scope: Message, receive: Receive, send: Send) -> None:
        self.front = front
        self.headers: Sequence[tuple[bytes, bytes]] = tuple(scope["headers"])
        self.found = dict(self.headers)
        self.request_id = front.ids.accepted(self.found.get(b"x-request-id"))
        self.address: str = scope["client"][0] if scope["client"] else ""
        self.connection: BoundedConnection = scope["state"]["connection"]
        self._scope = scope
        self._receive = receive
        self._send = send
        self._num_bytes = 0
        self._has_more = b"transfer-encoding" in self.found or self.length > 0
        self._must_close = scope["http_version"] == "1.0"
        self._is_late = False
        self._deadline = asyncio.get_running_loop().time() + front.config.http.request_timeout_s

    @property
    def length(self) -> int:
        """Bytes of the body as its head names them."""
        return int(self.found.get(b"content-length", b"0"))

    def check_head(self) -> None:
        """Refuse a head that programs on the way may read differently.

        Raises:
            HeadersTooLargeError: it is too large.
            BadRequestError: it names no host or several, or leaves open where the body ends.
        """
        limits = self.front.config.http
        size = sum([len(name) + len(value) + 4 for name, value in self.headers])
        if len(self.headers) > limits.max_headers or size > limits.max_header_bytes:
            raise self._closing(headers_too_large(limits))
        num_hosts = sum([name == b"host" for name, _ in self.headers])
        if num_hosts != 1 and (num_hosts or self._scope["http_version"] == "1.1"):
            raise self._closing(
                BadRequestError(f"the request names {num_hosts} hosts; expected one header Host")
            )
        coding = self.found.get(b"transfer-encoding")
        is_sized = b"content-length" in self.found
        if coding is not None and (coding.lower() != b"chunked" or is_sized):
            raise self._closing(
                BadRequestError("send the body in chunks without another coding, or with a length")
            )
        if (coding is not None or b"upgrade" in self.found) and not self.connection.is_strict:
            raise self._closing(
                BadRequestError("send a request in chunks, or with Upgrade, behind no other one")
            )

    async def body(self) -> bytes:
        """The whole body.

        Raises:
            TooLargeError: it is larger than `http.max_body_bytes`.
            OverloadedError: bodies of all connections fill `http.max_buffered_bytes`.
            RequestTimeoutError: it did not arrive in time.
            ClientGoneError: the client has closed its connection.
        """
        most = self.front.config.http.max_body_bytes
        if self.length > most:
            raise too_large(self.length, most)
        chunks: list[bytes] = []
        try:
            while True:
                chunks.append((await self.receive())["body"])
                if not self._has_more:
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        finally:
            self.release()

    async def receive(self) -> Message:
        """The next part of the body.

        Raises:
            ServingError: as `body`.
        """
        limits = self.front.config.http
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError as exc:
            self._is_late = True
            raise self._closing(arrives_late(limits)) from exc
        if message["type"] != "http.request":
            raise ClientGoneError("the client closed its connection")
        self.connection.progress()
        self._has_more = message.get("more_body", False)
        self._num_bytes += len(message["body"])
        self.front.buffered += len(message["body"])
        if self._num_bytes > limits.max_body_bytes:
            raise too_large(self._num_bytes, limits.max_body_bytes)
        if self.front.buffered > limits.max_buffered_bytes:
            raise self._closing(
                OverloadedError("bodies being received fill http.max_buffered_bytes", 1.0)
            )
        return message

    def release(self) -> None:
        """Count the bytes of the body no longer."""
        self.front.buffered -= self._num_bytes
        self._num_bytes = 0

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send the answer, then read what is left of the request or close the connection."""
        is_long = self.length > _NOT_READ or b"transfer-encoding" in self.found
        waits = b"expect" in self.found
        if self.front.stopping or self._must_close or (self._has_more and (is_long or waits)):
            headers.append((b"connection", b"close"))
            self._must_close = True
        headers.append((b"content-length", b"%d" % len(body)))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        if self._has_more:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            await self._discard()
            body = b""
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, error: ServingError) -> None:
        """Send why there is no answer."""
        await self.answer(
            error.status, refusal_headers(error, self.request_id), encode_error(str(error))
        )

    async def _discard(self) -> None:
        limit_s = self.front.config.http.request_timeout_s
        if self._must_close:
            limit_s = 0.0 if self._is_late else LINGER_S
        try:
            async with asyncio.timeout(limit_s):
                while self._has_more:
                    message = await self._receive()
                    self.connection.progress()
                    self._has_more = message.get("more_body", False)
        except TimeoutError:
            self.connection.close()

    def _closing(self, error: ServingError) -> ServingError:
        """The same error; the connection is closed after it."""
        self._must_close = True
        return error


def too_large(num_bytes: int, most: int) -> TooLargeError:
    """Why a body is not read."""
    return TooLargeError(
        f"the body has {num_bytes} bytes or more; this server takes {most} at most "
        "(http.max_body_bytes)"
    )


@lru_cache(256)
def served_headers(served: Served) -> tuple[tuple[bytes, bytes], ...]:
    """Headers that name what answered; the same few for all answers of a process."""
    values: tuple[str, ...] = (
        served.model,
        served.version,
        served.variant,
        served.slot,
        served.hardware,
    )
    values += (served.fell_over_from,) if served.fell_over_from else ()
    return tuple((n.encode(), as_header(v)) for n, v in zip(SERVED_HEADERS, values, strict=False))


def as_header(text: str) -> bytes:
    """Text as a header's value: what is not printable ASCII becomes a question mark."""
    return "".join(c if " " <= c <= "~" else "?" for c in text).encode("ascii")


def refusal_headers(error: ServingError, request_id: str) -> Headers:
    """Headers of a refusal."""
    headers = [JSON, *SECURITY_HEADERS, (b"x-request-id", request_id.encode())]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
