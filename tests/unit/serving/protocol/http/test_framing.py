"""Requests that can be read in two ways: one answer each, or the end of their connection."""

import asyncio
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any

import h11
import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config import checked_config
from serving.errors import ServingError
from serving.protocol.front import Front
from serving.protocol.http.framing import Head, read_chunks, read_head
from serving.protocol.http.listener import admin_listener, bound_socket, public_listener
from serving.protocol.http.pages import admin_pages
from serving.security.guard import OpenGuard
from tests.support.serving.inline_engine import InlineEngine
from tests.support.serving.odd_requests import HIDDEN, ODD, PATH, UPGRADES, Odd
from tests.support.suite.examples import examples

INFER = PATH + b"/infer"
INDEX = b"/v2/repository/index"
TOKEN = "a-token-of-the-test"
Pieces = Sequence[bytes]


def listener_of(is_admin: bool) -> Any:
    config = checked_config({"http": {"request_timeout_s": 2}, "stop_s": 2}, "the test")
    engine = InlineEngine(lambda inputs: pytest.fail("a model was asked"))
    front = Front(engine, OpenGuard(config), config)
    if is_admin:
        return admin_listener(front, admin_pages(front.engine, TOKEN, {}))
    return public_listener(front)


def statuses(asked: Sequence[Pieces], is_admin: bool = False) -> list[list[int]]:
    """What is answered on a connection for each, until its end; pieces are sent as they are."""

    async def one(port: int, pieces: Pieces) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            received = await asyncio.wait_for(reader.read(), 60)
        finally:
            writer.close()
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", received)]

    async def run() -> list[list[int]]:
        listener = listener_of(is_admin)
        sock = bound_socket("127.0.0.1", 0, "the test")
        serving = asyncio.ensure_future(listener.serve(sock))
        try:
            return [await one(sock.getsockname()[1], pieces) for pieces in asked]
        finally:
            listener.stop()
            await serving

    return asyncio.run(run())


def names_of(cases: Sequence[Odd], found: Sequence[list[int]], fits: Callable[..., bool]) -> Any:
    return {c.name: got for c, got in zip(cases, found, strict=True) if not fits(c, got)}


@pytest.mark.parametrize("path", [INFER, INDEX, b"/v2/nothing"])
def test_each_has_one_answer_or_costs_its_connection(path: bytes) -> None:
    def fits(case: Odd, got: list[int]) -> bool:
        last = [200] if case.taken else []  # pages and model refuse what the bodies are
        return len(got) == case.num_answers and got[case.num_requests :] == last

    found = statuses([[case.at(path)] for case in ODD])
    assert names_of(ODD, found, fits) == {}


@cache
def whole() -> list[list[int]]:
    return statuses([[case.at(INFER)] for case in ODD])


@examples(3)
@given(cuts=st.lists(st.integers(0, 400), max_size=12, unique=True))
def test_the_pieces_in_which_it_comes_change_nothing(cuts: list[int]) -> None:
    def pieces(data: bytes) -> Pieces:
        at = [0, *sorted(cuts), len(data)]
        return [data[a:b] for a, b in pairwise(at) if a < b]

    assert statuses([pieces(case.at(INFER)) for case in ODD]) == whole()


def test_the_admin_listener_too_answers_no_body() -> None:
    token = b"Authorization: Bearer " + TOKEN.encode()
    path = b"/admin/models/sums/slots"
    found = statuses([[case.at(path, token)] for case in ODD], is_admin=True)
    assert names_of(ODD, found, lambda case, got: len(got) <= case.num_requests + 1) == {}
    upgrades = statuses([[case.at(path, token)] for case in UPGRADES[:3]], is_admin=True)
    assert upgrades == [[400, 404]] * 3


ODD_BYTES = st.sampled_from(
    [b"\r", b"\n", b"\r\n", b" ", b"\t", b":", b"\0", b"\x0b", b",", b"\xff", b"0"]
)
CHUNKS = st.lists(st.sampled_from([b"{}", b"x" * 30, HIDDEN]), max_size=3)
HEADERS = st.lists(
    st.sampled_from(
        [b"Upgrade: h2c", b"Connection: upgrade, close", b"A:", b"A: \t b \t", b"A: \xe9"]
    ),
    max_size=4,
)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """A request in chunks or with a length, odd bytes at one or two places of it."""
    chunks, headers = draw(CHUNKS), draw(HEADERS)
    if draw(st.booleans()):
        framing, body = b"Transfer-Encoding: chunked", b""
        body = b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in chunks) + b"0\r\nB: c\r\n\r\n"
    else:
        body = b"".join(chunks)
        framing = b"Content-Length: %d" % len(body)
    data = b"\r\n".join([b"POST /a?b HTTP/1.1", b"Host: localhost", framing, *headers, b"", body])
    for odd in draw(st.lists(ODD_BYTES, max_size=2)):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + odd + data[at:]
    return data


@examples(100)
@given(data=messages())
def test_what_is_taken_two_other_parsers_read_in_the_same_way(data: bytes) -> None:
    rest = bytearray(data.lstrip(b"\r\n"))
    read = ours(rest)
    if read is None:
        return
    head, body, num_head = read
    found = (head.method, head.target, head.headers, body)
    assert found == by_h11(data)
    assert found[:3] == by_httptools(data.lstrip(b"\r\n")[:num_head])


def ours(rest: bytearray) -> tuple[Head, bytes, int] | None:
    """Head, body, and bytes of the head; None for what is rejected, or is not whole."""
    num_bytes, body = len(rest), bytearray()
    try:
        head: Head = whole_of(read_head(rest))
        num_head = num_bytes - len(rest)
        if head.length is None:
            whole_of(read_chunks(rest, body, 10**6))
        elif len(rest) < head.length:
            return None
    except (ServingError, LookupError):
        return None
    return head, bytes(body if head.length is None else rest[: head.length]), num_head


def whole_of(reading: Generator[None, None, Any]) -> Any:
    """What is read, where all of it is there."""
    try:
        next(reading)
    except StopIteration as end:
        return end.value
    raise LookupError("more bytes are needed")


def by_h11(data: bytes) -> tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data.lstrip(b"\r\n"))
    request, body = connection.next_event(), b""
    assert isinstance(request, h11.Request)
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        assert isinstance(event, h11.Data)
        body += bytes(event.data)
    return request.method, request.target, list(request.headers), body


def by_httptools(head: bytes) -> tuple[bytes, bytes, list[tuple[bytes, bytes]]]:
    target: list[bytes] = []
    headers: list[tuple[bytes, bytes]] = []

    class Seen:
        def on_url(self, part: bytes) -> None:
            target.append(part)

        def on_header(self, name: bytes, value: bytes) -> None:
            headers.append((name.lower(), value.rstrip(b" \t")))

    parser = httptools.HttpRequestParser(Seen())
    with suppress(httptools.HttpParserUpgrade):
        parser.feed_data(head)
    return parser.get_method(), b"".join(target), headers
