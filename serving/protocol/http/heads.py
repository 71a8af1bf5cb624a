"""Heads of HTTP answers, put together from parts that are made once."""

from __future__ import annotations

import math
from functools import cache
from http import HTTPStatus

from serving.calls import SERVED_HEADERS, Served
from serving.errors import ServingError

JSON = b"application/json"
BINARY = b"application/octet-stream"
SECURITY_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
Headers = list[tuple[bytes, bytes]]
_SECURITY = b"".join(b"%s: %s\r\n" % pair for pair in SECURITY_HEADERS)
_MOST_KNOWN = 256


def served_headers(served: Served) -> Headers:
    """Headers that say what answered."""
    values = (served.model, served.version, served.variant, served.slot, served.hardware)
    names = SERVED_HEADERS[: len(values)]
    pairs = [(name.encode(), as_header(value)) for name, value in zip(names, values, strict=True)]
    if served.fell_over_from:
        pairs.append((SERVED_HEADERS[-1].encode(), as_header(served.fell_over_from)))
    return pairs


def as_header(text: str) -> bytes:
    """Text as a header's value: what cannot stand there becomes a question mark."""
    return "".join(c if " " <= c <= "~" else "?" for c in text).encode("ascii")


@cache
def status_line(status: int) -> bytes:
    """First line of an answer."""
    return b"HTTP/1.1 %d %s\r\n" % (status, HTTPStatus(status).phrase.encode())


class Heads:
    """Makes heads of answers, and remembers what stays the same from one to the next."""

    def __init__(self) -> None:
        self._ok: dict[Served, bytes] = {}
        self._last: Served | None = None
        self._last_ok = b""

    def answered(
        self,
        served: Served,
        date: list[tuple[bytes, bytes]],
        request_id: str,
        num_bytes: int,
        json_bytes: int | None,
        keep_alive: bool,
    ) -> bytes:
        """Head of an answer with status 200, its empty line included.

        Args:
            date: default headers of the server.
            num_bytes: of the body.
            json_bytes: of its JSON part, where binary tensors follow.
        """
        if served is not self._last:
            self._last, self._last_ok = served, self._ok_of(served)
        what = (
            b"content-type: application/json\r\n"
            if json_bytes is None
            else b"content-type: application/octet-stream\r\n"
            b"inference-header-content-length: %d\r\n" % json_bytes
        )
        return b"%s%s%sx-request-id: %s\r\ncontent-length: %d\r\n%s\r\n" % (
            self._last_ok,
            b"".join([b"%s: %s\r\n" % pair for pair in date]),
            what,
            request_id.encode(),
            num_bytes,
            b"" if keep_alive else b"connection: close\r\n",
        )

    def _ok_of(self, served: Served) -> bytes:
        known = self._ok.get(served)
        if known is None:
            if len(self._ok) >= _MOST_KNOWN:
                self._ok.clear()
            lines = [b"%s: %s\r\n" % pair for pair in served_headers(served)]
            known = self._ok[served] = status_line(200) + _SECURITY + b"".join(lines)
        return known


def refusal_headers(error: ServingError, request_id: str) -> Headers:
    """Headers of a refusal, but for the length of its body."""
    headers = [(b"content-type", JSON), *SECURITY_HEADERS]
    if request_id:
        headers.append((b"x-request-id", request_id.encode()))
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def refused(
    error: ServingError, date: Headers, request_id: str, num_bytes: int, keep_alive: bool
) -> bytes:
    """Head of a refusal, its empty line included."""
    headers = [
        *date,
        *refusal_headers(error, request_id),
        (b"content-length", b"%d" % num_bytes),
    ]
    if not keep_alive:
        headers.append((b"connection", b"close"))
    lines = b"".join([b"%s: %s\r\n" % pair for pair in headers])
    return b"%s%s\r\n" % (status_line(error.status), lines)
