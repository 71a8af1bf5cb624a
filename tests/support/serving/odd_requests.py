"""Requests that programs on the way may read in two ways, and how each has to be answered.

Each is one request with one more behind it (`LAST`), which ends the connection. A body holds a
whole request (`HIDDEN`): whoever misses the body's end answers that one too.
"""

from dataclasses import dataclass

HIDDEN_PATH = b"/v2/repository/index"
PATH = b"/v2/models/sums"
LAST = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class Odd:
    """One request.

    Attributes:
        taken: whether it is one that the server takes, so that `LAST` is answered too. What it
            does not take costs the connection.
        num_requests: that it really is; what is no HTTP behind a request counts as one.
    """

    name: str
    data: bytes
    taken: bool = False
    num_requests: int = 1

    @property
    def num_answers(self) -> int:
        """On its connection, with `LAST`."""
        return self.num_requests + self.taken

    def at(self, path: bytes, *headers: bytes) -> bytes:
        """The same for another path and with more headers, `LAST` behind it."""
        lines = b"".join(line + b"\r\n" for line in headers)
        host = b"Host: localhost\r\n"
        return self.data.replace(host, host + lines, 1).replace(PATH, path) + LAST


def _post(*headers: bytes, body: bytes = b"", path: bytes = PATH, first: bytes = b"") -> bytes:
    head = first or b"POST %s HTTP/1.1\r\nHost: localhost" % path
    return b"\r\n".join([head, *headers, b"", b""]) + body


def _chunks(*bodies: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(body), body) for body in bodies) + b"0\r\n\r\n"


HIDDEN = _post(b"Content-Length: 2", body=b"{}", path=HIDDEN_PATH)
_LENGTH = b"Content-Length: %d" % len(HIDDEN)
_CHUNKED = b"Transfer-Encoding: chunked"
_UPGRADE = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk")


def _chunked(body: bytes) -> bytes:
    return _post(_CHUNKED, body=body)


def _with(*headers: bytes, body: bytes = HIDDEN) -> bytes:
    return _post(*headers, body=body)


def _sized(*headers: bytes) -> bytes:
    return _post(*headers, _LENGTH, body=HIDDEN)


UPGRADES = (
    Odd("an upgrade with a length", _sized(*_UPGRADE), True),
    Odd("an upgrade in chunks", _with(*_UPGRADE, _CHUNKED, body=_chunks(HIDDEN, b"x")), True),
    Odd("an upgrade to websocket", _sized(b"Connection: upgrade", b"Upgrade: websocket"), True),
    Odd("an upgrade, twice", _sized(*_UPGRADE) * 2, True, 2),
)
ODD = (
    *UPGRADES,
    Odd("an upgrade and an unknown coding", _with(*_UPGRADE, b"Transfer-Encoding: gzip")),
    Odd("CONNECT", _post(first=b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost")),
    Odd("two lengths", _with(b"Content-Length: 0", _LENGTH)),
    Odd("a list of lengths", _with(b"Content-Length: %d, %d" % (len(HIDDEN), len(HIDDEN)))),
    Odd("a negative length", _with(b"Content-Length: -%d" % len(HIDDEN))),
    Odd("an empty length", _with(b"Content-Length:")),
    Odd("a length past 64 bits", _with(b"Content-Length: 99999999999999999999999")),
    Odd("a length with zeros before it", _with(b"Content-Length: 00%d" % len(HIDDEN)), True),
    Odd("length, then chunks", _with(b"Content-Length: 4", _CHUNKED, body=_chunks(HIDDEN))),
    Odd("an unknown coding", _with(b"Transfer-Encoding: xchunked", body=_chunks(HIDDEN))),
    Odd("an empty coding", _with(b"Transfer-Encoding:", body=_chunks(HIDDEN))),
    Odd("chunks inside another coding", _with(b"Transfer-Encoding: chunked, identity")),
    Odd("chunked twice", _with(_CHUNKED, _CHUNKED, body=_chunks(HIDDEN))),
    Odd("chunked behind a tab", _with(b"Transfer-Encoding:\tchunked", body=_chunks(HIDDEN)), True),
    Odd("chunked behind a vertical tab", _with(b"Transfer-Encoding: \x0bchunked")),
    Odd("chunked in capitals", _with(b"Transfer-Encoding: ChunKed", body=_chunks(HIDDEN)), True),
    Odd("a space before the colon", _with(b"Transfer-Encoding : chunked", body=_chunks(HIDDEN))),
    Odd("chunks of HTTP/1.0", _post(_CHUNKED, first=b"POST " + PATH + b" HTTP/1.0"), False),
    Odd("a size that is no number", _chunked(b"zz\r\n%s\r\n0\r\n\r\n" % HIDDEN)),
    Odd("a size past all bounds", _chunked(b"f" * 25 + b"\r\n{}\r\n0\r\n\r\n")),
    Odd("a space behind a size", _chunked(b"2 \r\n{}\r\n0\r\n\r\n")),
    Odd("an extension", _chunked(b'2;a=b;c="d"\r\n{}\r\n0;e\r\n\r\n'), True),
    Odd("an extension with a bare line feed", _chunked(b"2;\n{}\r\n0\r\n\r\n" + HIDDEN)),
    Odd("nothing behind a chunk", _chunked(b"2\r\n{}0\r\n\r\n" + HIDDEN)),
    Odd("a trailer", _chunked(b"2\r\n{}\r\n0\r\nx-falaj-slot: shadow\r\n\r\n"), True),
    Odd("a length behind the body", _chunked(b"2\r\n{}\r\n0\r\n" + _LENGTH + b"\r\n\r\n")),
    Odd("a request line as trailer", _chunked(b"2\r\n{}\r\n0\r\n" + HIDDEN)),
    Odd("line feeds alone", _with(_LENGTH).replace(b"\r\n", b"\n")),
    Odd("a line feed in a header", _with(b"A: b\nContent-Length: %d" % len(HIDDEN))),
    Odd("a null in a header", _with(b"A: b\0", _LENGTH)),
    Odd("a folded header", _with(b"A: b\r\n c", _LENGTH)),
    Odd("a fold behind the first line", _post(first=b"POST %s HTTP/1.1\r\n A: b" % PATH)),
    Odd("a header without a name", _with(b": 2", _LENGTH)),
    Odd("an address with a host", _post(_LENGTH, body=HIDDEN, path=b"http://other.example" + PATH)),
    Odd("a fragment", _post(_LENGTH, body=HIDDEN, path=PATH + b"#part")),
    Odd("no host", _post(_LENGTH, body=HIDDEN, first=b"POST %s HTTP/1.1" % PATH)),
    Odd("two hosts", _sized(b"Host: other.example")),
    Odd("an unknown version", _post(first=b"POST %s HTTP/1.2\r\nHost: localhost" % PATH)),
    Odd("HTTP/2 begun without asking", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    Odd("a method in small letters", _post(first=b"post %s HTTP/1.1\r\nHost: localhost" % PATH)),
    Odd("a tab for a space", _post(first=b"POST\t%s HTTP/1.1\r\nHost: localhost" % PATH)),
    Odd("a header too long", _sized(b"A: " + b"b" * 70_000)),
    Odd("too many headers", _sized(*[b"A: b"] * 200)),
    Odd("no HTTP, and a request behind it", b"NONSENSE\r\n\r\n" + HIDDEN),
    Odd("a second body", _with(_CHUNKED, body=_chunks(HIDDEN) + _chunks(HIDDEN)), False, 2),
    Odd("empty lines before it", b"\r\n\r\n" + _with(_LENGTH), True),
    Odd("an unknown expectation", _sized(b"Expect: 200-ok"), True),
)
