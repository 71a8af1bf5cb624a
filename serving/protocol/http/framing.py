"""Where a request ends, and whose it is: what another program in front may read differently.

Two of its kind cannot be told from the parser's callbacks. A head with two names of hosts, or with
a coding of the body that is not read here, is refused. A wish for another protocol is not: RFC 9110
(7.8) lets a server ignore it, as Java's client and `curl --http2` expect of one that has no HTTP/2
in clear text. httptools however ends such a message at its headers, and would take its body for the
next request: one request, two answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import httptools

from serving.errors import BadRequestError

Head = Sequence[tuple[bytes, bytes]]
"""Headers of a request, names in lower case."""
_FRAMING = (b"content-length", b"transfer-encoding")


def check_head(headers: Head, http_version: str) -> None:
    """Refuse a head that says less, or more, than which host is asked and where the body ends.

    Raises:
        BadRequestError: the connection cannot be used any further.
    """
    num_hosts = 0
    for name, value in headers:
        if name == b"host":
            num_hosts += 1
        elif name == b"transfer-encoding" and value.lower() != b"chunked":
            raise BadRequestError(
                f"the transfer coding {value.decode('latin-1')[:40]!r} is not read here; send the "
                "body chunked, or with its length"
            )
    if num_hosts != 1 and (num_hosts or http_version == "1.1"):
        raise BadRequestError(f"the request names {num_hosts} hosts; expected one header Host")


class _Later:
    """Callbacks of a connection, passed on once `is_on`."""

    def __init__(self, connection: object) -> None:
        self._connection = connection
        self.is_on = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        callback = getattr(self._connection, name)

        def passed_on(*arguments: Any) -> None:
            if self.is_on:
                callback(*arguments)

        return passed_on


def parser_of_body(
    connection: object, headers: Head, keep_alive: bool
) -> httptools.HttpRequestParser:
    """A parser for the body of a request whose headers `connection` has seen, and what follows.

    Args:
        keep_alive: whether another request may follow; if not, the rest is thrown away.

    Raises:
        HttpParserError: these headers do not tell where a body ends.
    """
    lines = [b"%s: %s\r\n" % pair for pair in headers if pair[0] in _FRAMING]
    if not keep_alive:
        lines.append(b"connection: close\r\n")
    callbacks = _Later(connection)
    parser = httptools.HttpRequestParser(callbacks)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
    parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(lines))
    callbacks.is_on = True
    return parser
