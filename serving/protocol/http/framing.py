"""Where a request starts and ends in the bytes of a connection, and what its head holds.

One reading only: whatever another program on the way could read differently is rejected (RFC 9112,
sections 3, 5.1, 6 and 7.1). `Upgrade` is ignored, as RFC 9110 (7.8) allows.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from serving.config import MAX_HEADER_BYTES, MAX_HEADERS
from serving.errors import BadRequestError, HeadersTooLargeError, TooLargeError

_FIELD = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[^\x00-\x08\x0a-\x1f\x7f]*+\r\n"
_HEAD = re.compile(
    rb"([A-Z]{1,20}) (/[!\"$-~]*+) HTTP/1\.([01])\r\n((?:%s)*+)\r\n" % _FIELD
)  # a target with a host or a fragment is none of ours
_FIELDS = re.compile(rb"(?:%s)*+" % _FIELD)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;[\t -~\x80-\xff]*+)?")
_CHUNKED = re.compile(rb"(?:^|\n)transfer-encoding:[ \t]*chunked *\r", re.IGNORECASE)
"""Other spaces behind it are rejected by llhttp, on which many programs on the way are built."""
_ONCE = (b"host", b"content-length", b"transfer-encoding")
_MOST_CHUNK_LINE = 1024
"""Bytes of a chunk's size and its extensions."""
_END = b"\r\n\r\n"


class Head(NamedTuple):
    """Request line and headers.

    Attributes:
        target: path and query.
        headers: names in lower case.
        found: the same by name.
        length: bytes of the body; None where it comes in chunks.
    """

    method: bytes
    target: bytes
    is_1_0: bool
    headers: list[tuple[bytes, bytes]]
    found: dict[bytes, bytes]
    length: int | None


def split_head(data: bytes) -> tuple[Head, bytes] | None:
    """The head that bytes start with, and what follows it; None while it is not whole.

    Args:
        data: a connection's bytes, without empty lines before the request.

    Raises:
        HeadersTooLargeError: it is larger than a head may be.
        BadRequestError: it is no HTTP/1.1, or programs could read it differently.
    """
    end = data.find(_END)
    if end + len(_END) > MAX_HEADER_BYTES or (end < 0 and len(data) > MAX_HEADER_BYTES):
        raise headers_too_large()
    if end < 0:
        if not data[:1].isupper():
            raise BadRequestError("the request is no HTTP; expected `METHOD /path HTTP/1.1`")
        return None
    end += len(_END)
    return _head(data[:end]), data[end:]


def _head(data: bytes) -> Head:
    match = _HEAD.fullmatch(data)
    if match is None:
        raise BadRequestError(
            "the request is no HTTP; expected `METHOD /path HTTP/1.1`, then lines `Name: value`"
        )
    method, target, minor, fields = match.groups()
    headers = _pairs(fields)
    if len(headers) > MAX_HEADERS:
        raise headers_too_large()
    found = dict(headers)
    if len(found) < len(headers):
        names = [name for name, _ in headers]
        for name in _ONCE:
            if names.count(name) > 1:
                raise BadRequestError(f"the request has the header {name.decode()} twice")
    if b"host" not in found and minor == b"1":
        raise BadRequestError("the request has no header Host")
    return Head(
        method, target, minor == b"0", headers, found, _length(found, fields, minor == b"0")
    )


def _pairs(fields: bytes) -> list[tuple[bytes, bytes]]:
    pairs = []
    for line in fields.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        pairs.append((name.lower(), value.strip(b" \t")))
    return pairs


def _length(found: dict[bytes, bytes], fields: bytes, is_1_0: bool) -> int | None:
    """Bytes of a body; None for chunks."""
    length = found.get(b"content-length")
    if b"transfer-encoding" in found:
        if not _CHUNKED.search(fields) or length is not None or is_1_0:
            raise BadRequestError(
                "send the body in chunks without another coding, or with a length"
            )
        return None
    if length is None:
        return 0
    if not length.isdigit() or len(length) > 18:
        raise BadRequestError(f"Content-Length is {length[:40].decode('latin-1')!r}, not a number")
    return int(length)


class SizedBody:
    """A body whose length is known."""

    def __init__(self, length: int) -> None:
        self._content = bytearray()
        self._left = length

    @property
    def num_bytes(self) -> int:
        """That came so far."""
        return len(self._content)

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes; what follows the body once it is whole, else None."""
        left = self._left
        self._content += data[:left]
        self._left = max(0, left - len(data))
        return None if self._left else data[left:]

    def take(self) -> bytes:
        """The body; it is kept no longer."""
        content, self._content = bytes(self._content), bytearray()
        return content


class ChunkedBody(SizedBody):
    """A body in chunks (RFC 9112, 7.1); what stands behind the last one is checked and dropped.

    Args:
        most: bytes of the body.

    `_left` is of the chunk that is coming, with its line end.
    """

    def __init__(self, most: int) -> None:
        super().__init__(0)
        self._most = most
        self._line = b""
        self._trailer_bytes = -1
        """So far; -1 before the last chunk."""

    def feed(self, data: bytes) -> bytes | None:
        """As `SizedBody.feed`.

        Raises:
            TooLargeError: the body is larger than `most`.
            HeadersTooLargeError: headers behind it are larger than a head may be.
            BadRequestError: these are no chunks.
        """
        data, at = self._line + data, 0
        while True:
            if self._left:
                at = self._add(data, at)
            end = data.find(b"\r\n", at)
            if self._left or end < 0:
                self._line = data[at:]
                self._bound(len(self._line))
                return None
            line, at = data[at:end], end + 2
            self._bound(len(line))
            if self._trailer_bytes < 0:
                self._begin_chunk(line)
            elif not line:
                return data[at:]
            else:
                self._check_trailer(line)

    def _add(self, data: bytes, at: int) -> int:
        part = data[at : at + self._left]
        self._content += part
        self._left -= len(part)
        if not self._left:
            if self._content[-2:] != b"\r\n":
                raise BadRequestError("a chunk of the body is not as long as it says")
            del self._content[-2:]
        return at + len(part)

    def _begin_chunk(self, line: bytes) -> None:
        match = _CHUNK.fullmatch(line)
        if match is None:
            raise BadRequestError("a chunk of the body does not start with its size")
        size = int(match[1], 16)
        if len(self._content) + size > self._most:
            raise too_large(len(self._content) + size, self._most)
        self._left = size + 2 if size else 0
        self._trailer_bytes = -1 if size else 0

    def _check_trailer(self, line: bytes) -> None:
        self._trailer_bytes += len(line) + 2
        name = line.partition(b":")[0].lower()
        if name in _ONCE or not _FIELDS.fullmatch(line + b"\r\n"):
            raise BadRequestError("what follows the body is no header that may stand there")

    def _bound(self, num_bytes: int) -> None:
        """Refuse a line that is too long, whole or not."""
        if self._trailer_bytes + num_bytes > MAX_HEADER_BYTES:
            raise headers_too_large()
        if self._trailer_bytes < 0 and num_bytes > _MOST_CHUNK_LINE:
            raise BadRequestError("a chunk of the body does not start with its size")


def headers_too_large() -> HeadersTooLargeError:
    """Why a head is not read."""
    return HeadersTooLargeError(
        f"this server takes a request line and headers of {MAX_HEADER_BYTES} bytes and "
        f"{MAX_HEADERS} headers at most"
    )


def too_large(num_bytes: int, most: int) -> TooLargeError:
    """Why a body is not read."""
    return TooLargeError(
        f"the body has {num_bytes} bytes or more; this server takes {most} at most here "
        "(http.max_body_bytes)"
    )
