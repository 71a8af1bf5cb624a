"""Where a request starts and ends in the bytes of a connection, and what its head holds.

One reading only: whatever another program on the way could read differently is rejected (RFC 9112,
sections 3, 5.1, 6 and 7.1). `Upgrade` is ignored, as RFC 9110 (7.8) allows.

What reads takes a connection's bytes from their front, and yields where it needs more of them.
"""

import re
from collections.abc import Generator
from typing import NamedTuple

from serving.config import MAX_HEADER_BYTES, MAX_HEADERS
from serving.errors import BadRequestError, HeadersTooLargeError, TooLargeError

# A tab may not end a value: llhttp, on which many programs on the way are built, rejects it.
_VALUE = rb"(?:[^\x00-\x1f\x7f]++|\t(?![\t ]*+\r))*+"
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]++):(" + _VALUE + rb")\r\n")
_HEAD = re.compile(
    rb"([A-Z]{1,20}) (/[!\"$-~]*+) HTTP/1\.([01])\r\n((?:%s)*+)\r\n"
    % re.sub(rb"\((?!\?)", b"(?:", _FIELD.pattern)
)  # a target with a host or a fragment is none of ours
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;[\t -~\x80-\xff]*+)?")
_ONCE = (b"host", b"content-length", b"transfer-encoding")
_MOST_CHUNK_LINE = 1024
"""Bytes of a chunk's size and its extensions."""

_TOO_LARGE = (
    f"this server takes a request line and headers of {MAX_HEADER_BYTES} bytes and {MAX_HEADERS} "
    "headers at most"
)


class Head(NamedTuple):
    """Request line and headers.

    Attributes:
        target: path and query.
        is_last: whether the connection ends with this request.
        waits: whether its client waits to be told to send the body.
        headers: names in lower case.
        found: the same by name.
        length: bytes of the body; None where it comes in chunks.
    """

    method: bytes
    target: bytes
    is_last: bool
    waits: bool
    headers: list[tuple[bytes, bytes]]
    found: dict[bytes, bytes]
    length: int | None


def read_head(rest: bytearray) -> Generator[None, None, Head]:
    """Take the head that bytes start with.

    Raises:
        HeadersTooLargeError: it is larger than a head may be.
        BadRequestError: it is no HTTP/1.1, or programs could read it differently.
    """
    while (end := rest.find(b"\r\n\r\n") + 4) < 4 and len(rest) <= MAX_HEADER_BYTES:
        if not rest[:1].isupper():
            break
        yield
    if max(end, len(rest) if end < 4 else 0) > MAX_HEADER_BYTES:
        raise HeadersTooLargeError(_TOO_LARGE)
    match = _HEAD.fullmatch(rest, 0, end)
    if match is None:
        raise BadRequestError(
            "the request is no HTTP; expected `METHOD /path HTTP/1.1`, then lines `Name: value`"
        )
    method, target, minor, fields = match.groups()
    del match, rest[:end]
    headers = [(name.lower(), value.strip(b" \t")) for name, value in _FIELD.findall(fields)]
    found = dict(headers)
    if len(headers) > MAX_HEADERS:
        raise HeadersTooLargeError(_TOO_LARGE)
    if len(found) < len(headers):
        names = [name for name, _ in headers]
        if twice := [name.decode() for name in _ONCE if names.count(name) > 1]:
            raise BadRequestError(f"the request has the header {twice[0]} twice")
    if b"host" not in found and minor == b"1":
        raise BadRequestError("the request has no header Host")
    words = found.get(b"connection", b"").lower().replace(b" ", b"").split(b",")
    is_last = minor == b"0" or b"close" in words
    waits = minor == b"1" and found.get(b"expect", b"").lower() == b"100-continue"
    return Head(method, target, is_last, waits, headers, found, _length(found, minor == b"0"))


def _length(found: dict[bytes, bytes], is_1_0: bool) -> int | None:
    """Bytes of a body; None for chunks."""
    length, coding = found.get(b"content-length"), found.get(b"transfer-encoding")
    if coding is not None:
        if coding.lower() != b"chunked" or length is not None or is_1_0:
            raise BadRequestError(
                "send the body in chunks without another coding, or with a length"
            )
        return None
    if length is not None and (not length.isdigit() or len(length) > 18):
        raise BadRequestError(f"Content-Length is {length[:40].decode('latin-1')!r}, not a number")
    return int(length or 0)


def read_chunks(rest: bytearray, body: bytearray, most: int) -> Generator[None, None, None]:
    """Take a body in chunks (RFC 9112, 7.1); what stands behind the last is checked and dropped.

    Args:
        rest: a connection's bytes.
        body: to which it is added.
        most: bytes of the body.

    Raises:
        TooLargeError: the body is larger than `most`.
        HeadersTooLargeError: headers behind it are larger than a head may be.
        BadRequestError: these are no chunks.
    """
    no_size = BadRequestError("a chunk of the body does not start with its size")
    while True:
        match = _CHUNK.fullmatch((yield from _line(rest, _MOST_CHUNK_LINE, no_size)))
        if match is None:
            raise no_size
        size = int(match[1], 16)
        if not size:
            break
        check_size(len(body) + size, most)
        while len(rest) < size + 2:
            yield
        if rest[size : size + 2] != b"\r\n":
            raise BadRequestError("a chunk of the body is not as long as it says")
        body += rest[:size]
        del rest[: size + 2]
    left = MAX_HEADER_BYTES
    while line := (yield from _line(rest, left, HeadersTooLargeError(_TOO_LARGE))):
        left -= len(line) + 2
        if line.partition(b":")[0].lower() in _ONCE or not _FIELD.fullmatch(line + b"\r\n"):
            raise BadRequestError("what follows the body is no header that may stand there")


def _line(rest: bytearray, most: int, too_long: Exception) -> Generator[None, None, bytes]:
    while (end := rest.find(b"\r\n")) < 0 and len(rest) <= most + 1:
        yield
    if not 0 <= end <= most:
        raise too_long
    line = bytes(rest[:end])
    del rest[: end + 2]
    return line


def check_size(num_bytes: int, most: int) -> None:
    """Refuse a body that is too large.

    Raises:
        TooLargeError: it is.
    """
    if num_bytes > most:
        raise TooLargeError(
            f"the body has {num_bytes} bytes or more; this server takes {most} at most here "
            "(http.max_body_bytes)"
        )
