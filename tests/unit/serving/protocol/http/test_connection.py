"""The connection's own protocol against an engine whose answers the test holds back."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.calls import Answer, Call, Served
from serving.config import ServingConfig, checked_config
from serving.errors import ForbiddenError, OverloadedError, ServingError, TooManyRequestsError
from serving.interfaces import Action, Done, Headers, Principal
from serving.protocol.front import Front
from serving.protocol.http.connection import Connection
from serving.protocol.http.listener import bound_socket, public_listener
from serving.security.assembly import OpenGuard
from serving.security.certificates import ensure_authority, ensure_certificate
from serving.security.config import TlsConfig
from serving.security.tls import server_context
from tests.support.serving.inline_engine import InlineEngine
from tests.support.serving.serving_clients import raw, request

SERVED = Served("sums", "1", "onnx-fp32", "stable", "cpu", "openvino-int8")
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class HeldEngine(InlineEngine):
    """Answers a call when the test says so."""

    def __init__(self) -> None:
        super().__init__(lambda inputs: {})
        self.held: list[tuple[Call, Done]] = []
        self.broken = False

    def submit(self, call: Call, done: Done) -> None:
        if self.broken:
            raise LookupError("a fault of ours")
        self.held.append((call, done))

    def answer(self, at: int = 0) -> None:
        call, done = self.held.pop(at)
        done(call, Answer({"score": np.full(call.num_rows, 7, np.float32)}, SERVED))


class Noting:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def served(self, batch: object) -> None: ...

    def refused(self, call: Call, error: ServingError) -> None:
        self.told.append((call.model, error.reason))


class StrictGuard:
    """Admits who says `x-who: me`, and not too often."""

    def __init__(self) -> None:
        self.asked: list[tuple[Action, str | None]] = []

    def admit(self, headers: Headers, address: str, action: Action, model: str | None) -> Principal:
        self.asked.append((action, model))
        assert address == "127.0.0.1"
        who = dict(headers).get(b"x-who")
        if who == b"often":
            raise TooManyRequestsError("come later", 2.2)
        if who != b"me":
            raise ForbiddenError("not you")
        return Principal("me", "", {"*": frozenset({action})}, 1e12)


def front_of(engine: HeldEngine, guard: Any = None, **http: Any) -> Front:
    config: ServingConfig = checked_config({"http": http, "stop_s": 2}, "the test")
    return Front(engine, guard or OpenGuard(config), config, (Noting(),))


@pytest.fixture
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head may have 1024 bytes."""
    monkeypatch.setattr("serving.protocol.http.framing.MAX_HEADER_BYTES", 1024)


def talk(front: Front, *talks: Talk, tls: Sequence[ssl.SSLContext | None] = (None, None)) -> None:
    """Run a listener and talk to it on a connection each, one after the other.

    Args:
        tls: contexts of the listener and of its client.
    """
    server, client = tls

    async def run() -> None:
        listener = public_listener(front, server)
        sock = bound_socket("127.0.0.1", 0, "the test")
        port = sock.getsockname()[1]
        serving = asyncio.ensure_future(listener.serve(sock))
        try:
            for one in talks:
                reader, writer = await asyncio.open_connection("localhost", port, ssl=client)
                await asyncio.wait_for(one(reader, writer), 60)
                writer.close()
        finally:
            listener.stop()
            await serving

    asyncio.run(run())


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.005)


async def read(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return int(head[0].split()[1]), headers, json.loads(body) if body else None


def test_a_call_says_what_the_request_said() -> None:
    engine = HeldEngine()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
        headers = ["X-Request-Id: r-1", "x-falaj-timeout-ms: 2000", f"traceparent: {trace}"]
        headers += ["x-falaj-slot: stable"]
        writer.write(raw(request(2), *headers, path="/v2/models/sums/versions/1/infer?x=1"))
        await until(lambda: engine.held)
        call = engine.held[0][0]
        assert (call.model, call.version, call.slot, call.num_rows) == ("sums", "1", "stable", 2)
        assert (call.request_id, call.trace) == ("r-1", trace)
        assert call.deadline == pytest.approx(call.arrived + 2)
        engine.answer()
        status, headers_, body = await read(reader)
        assert (status, body["outputs"][0]["data"]) == (200, [7, 7])
        assert headers_["x-falaj-fell-over"] == "openvino-int8"

    talk(front_of(engine), one)


def test_the_longest_time_is_the_configurations() -> None:
    engine = HeldEngine()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number, told in enumerate(("99999999", "0")):
            writer.write(raw(request(), f"x-falaj-timeout-ms: {told}"))
            await until(lambda number=number: len(engine.held) == 1)  # type: ignore[misc]
            call = engine.held[0][0]
            assert call.deadline == pytest.approx(call.arrived + 30)
            engine.answer()
            await read(reader)

    talk(front_of(engine), one)


def test_a_call_whose_client_has_gone_says_so_and_its_answer_goes_nowhere() -> None:
    engine = HeldEngine()
    front = front_of(engine)

    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw(request()) + raw(request()))
        await until(lambda: engine.held)
        assert not engine.held[0][0].is_gone
        writer.transport.abort()
        await until(lambda: engine.held[0][0].is_gone)
        engine.answer()
        assert not engine.held  # the one behind it was never started

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw(request()))
        await until(lambda: engine.held)
        engine.answer()
        assert (await read(reader))[0] == 200

    talk(front, leave, other)
    assert front.buffered == 0


def test_a_pipelined_request_starts_when_the_one_before_it_is_answered() -> None:
    engine = HeldEngine()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        page = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
        second = raw(request(3))
        writer.write(raw(request(2)) + page + second[:50])
        await until(lambda: engine.held)
        writer.write(second[50:] + b"nonsense\r\n\r\n")
        await asyncio.sleep(0.05)
        assert len(engine.held) == 1
        engine.answer()
        assert (await read(reader))[2]["outputs"][0]["shape"] == [2]
        assert (await read(reader))[2] == {"live": True}
        await until(lambda: engine.held)
        engine.answer()
        assert (await read(reader))[2]["outputs"][0]["shape"] == [3]
        status, headers, _ = await read(reader)
        assert (status, headers["connection"]) == (400, "close")
        assert await reader.read() == b""

    talk(front_of(engine), one)


@pytest.mark.usefixtures("small_heads")
def test_a_piece_that_ends_in_a_late_requests_headers_is_not_all_headers() -> None:
    live = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(live * 100 + live[:30])
        for _ in range(100):
            assert (await read(reader))[0] == 200
        writer.write(live[30:])
        assert (await read(reader))[0] == 200
        # What is its own still counts, whether whole or not.
        writer.write(live + live[:30] + b"x: " + b"a" * 2000 + b"\r\ny: ")
        assert [(await read(reader))[0] for _ in range(2)] == [200, 431]

    talk(front_of(HeldEngine()), one)


def test_refusals_before_the_engine_keep_the_connection_and_are_told() -> None:
    engine, guard = HeldEngine(), StrictGuard()
    front = front_of(engine, guard)

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw(request()))
        assert (await read(reader))[0] == 403
        writer.write(raw(request(), "X-Who: often"))
        status, headers, _ = await read(reader)
        assert (status, headers["retry-after"]) == (429, "3")
        writer.write(raw({"inputs": []}, "X-Who: me"))
        assert (await read(reader))[0] == 400
        writer.write(raw(request(), "X-Who: me", "Content-Encoding: gzip"))
        assert (await read(reader))[0] == 415
        writer.write(raw(request(), "X-Who: me"))
        await until(lambda: engine.held)
        assert engine.held[0][0].subject == "me"
        engine.answer()
        assert (await read(reader))[0] == 200
        writer.write(b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await read(reader))[0] == 403

    talk(front, one)
    assert guard.asked[0] == ("infer", "sums")
    assert guard.asked[-1] == ("admin", None)
    (noting,) = front.observers
    assert isinstance(noting, Noting)
    assert [reason for _, reason in noting.told] == [
        "forbidden",
        "rate_limited",
        "bad_request",
        "unsupported_body",
    ]


def test_a_call_that_would_wait_too_long_is_refused_before_its_body_is_looked_at() -> None:
    engine = HeldEngine()
    front = front_of(engine)

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine.refuses = OverloadedError("busy", 1.2)
        writer.write(raw(b"no JSON at all"))
        status, headers, body = await read(reader)
        assert (status, headers["retry-after"], body) == (503, "2", {"error": "busy"})
        engine.refuses = None
        writer.write(raw(request()))
        await until(lambda: engine.held)
        engine.answer()
        assert (await read(reader))[0] == 200

    talk(front, one)
    (noting,) = front.observers
    assert isinstance(noting, Noting)
    assert noting.told == [("sums", "overloaded")]


@pytest.mark.parametrize("size", [100, 100_000])
def test_a_stranger_that_waits_to_be_told_to_go_on_is_refused_before_its_body_is_sent(
    size: int,
) -> None:
    front = front_of(HeldEngine(), StrictGuard())

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = raw(b"x" * size, "Expect: 100-continue")[:-size]
        writer.write(head)
        assert (await read(reader))[0] == 403
        assert await reader.read() == b""

    talk(front, one)


def test_bodies_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.protocol.http.connection.MAX_BUFFERED_BYTES", 5000)
    front = front_of(HeldEngine())

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw(b"x" * 10_000)[:-1000])
        status, headers, _ = await read(reader)
        assert (status, headers["retry-after"]) == (503, "1")

    talk(front, one)
    assert front.buffered == 0


def test_a_fault_of_ours_is_a_500_and_the_server_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = HeldEngine()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine.broken = True
        writer.write(raw(request()))
        status, _, body = await read(reader)
        assert (status, body) == (500, {"error": "this server has failed on the request"})
        engine.broken = False
        writer.write(raw(request()))
        await until(lambda: engine.held)
        call, done = engine.held.pop()
        done(call, Answer({"other": np.zeros(1, np.float32)}, SERVED))
        assert (await read(reader))[0] == 500
        writer.write(raw(request()))
        await until(lambda: engine.held)
        engine.answer()
        assert (await read(reader))[0] == 200

    talk(front_of(engine), one)
    assert "could not be taken" in caplog.text


def test_a_request_on_its_way_when_the_process_ends_is_answered_and_is_the_last() -> None:
    engine = HeldEngine()
    front = front_of(engine)

    async def run() -> None:
        listener = public_listener(front)
        sock = bound_socket("127.0.0.1", 0, "the test")
        serving = asyncio.ensure_future(listener.serve(sock))
        address = sock.getsockname()
        reader, writer = await asyncio.open_connection(*address)
        idle, idle_writer = await asyncio.open_connection(*address)
        await until(lambda: len(listener.connections) == 2)
        front.stopping = True
        listener.stop()
        writer.write(raw(request(2)) + raw(request(3)))
        await until(lambda: engine.held)
        engine.answer()
        status, headers, body = await read(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert body["outputs"][0]["shape"] == [2]
        assert (await reader.read(), await idle.read(), engine.held) == (b"", b"", [])
        for one in (writer, idle_writer):
            one.close()
        await serving

    asyncio.run(run())


def test_http_1_0_and_connection_close_end_the_connection() -> None:
    engine = HeldEngine()

    async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw(request()).replace(b"HTTP/1.1", b"HTTP/1.0"))
        await until(lambda: engine.held)
        engine.answer()
        assert (await read(reader))[1]["connection"] == "close"
        assert await reader.read() == b""

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw(request(), "Connection: close"))
        await until(lambda: engine.held)
        engine.answer()
        await read(reader)
        assert await reader.read() == b""

    talk(front_of(engine), old, close)


@pytest.mark.parametrize(("host", "open_to_all"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_an_open_guard_stands_on_loopback_only(host: str, open_to_all: bool) -> None:
    from tasks.kernel.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match="need a guard"):
        OpenGuard(ServingConfig(host=host, open_to_all=open_to_all))


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({}, True),
        ({b"host": b"localhost:8000"}, True),
        ({b"host": b"127.0.0.1", b"origin": b"http://localhost:3000"}, True),
        ({b"host": b"[::1]:8000"}, True),
        ({b"host": b"rebound.example:8000"}, False),
        ({b"host": b"localhost.example"}, False),
        ({b"host": b"localhost", b"origin": b"https://evil.example"}, False),
        ({b"host": b"localhost", b"origin": b"null"}, False),
        ({b"host": b"[::1]evil.example"}, False),
        ({b"host": b"localhost:x@evil.example"}, False),
    ],
)
def test_an_open_guard_lets_no_page_of_another_site_ask(
    headers: dict[bytes, bytes], is_let_in: bool
) -> None:
    guard = OpenGuard(ServingConfig())
    expected = nullcontext() if is_let_in else pytest.raises(ForbiddenError, match="another site")
    with expected:
        guard.admit(list(headers.items()), "127.0.0.1", "read", None)


def test_request_ids_are_sane_and_differ() -> None:
    ids = front_of(HeldEngine()).ids
    sent: Sequence[bytes | None] = (None, None, b"", b"a b", b"x" * 200, b"\xff")
    assert len({ids.accepted(one) for one in sent}) == len(sent)
    assert ids.accepted(b"a-B_1.2:3/4=@+") == "a-B_1.2:3/4=@+"


def test_a_page_is_shown_once_the_body_is_there_and_without_one_only_its_connection_ends() -> None:
    front = front_of(HeldEngine(), request_timeout_s=0.2)
    asked = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n"

    async def announced(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(asked + b"Content-Length: 10\r\n\r\n")
        assert (await read(reader))[0] == 408
        assert await reader.read() == b""

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(asked + b"Content-Length: 4\r\n\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"body" + asked + b"\r\nNO HTTP AT ALL\r\n\r\n")
        assert [(await read(reader))[0] for _ in range(3)] == [200, 200, 400]
        assert await reader.read() == b""

    talk(front, announced, late)


def test_a_fault_in_the_sweep_of_one_connection_ends_that_one_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Connection, at: float) -> None:
        raise LookupError("a fault of ours")

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        monkeypatch.setattr(Connection, "sweep", broken)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        monkeypatch.undo()

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await read(reader))[0] == 200

    talk(front_of(HeldEngine()), one, other)
    assert "could not be swept" in caplog.text


def test_who_asks_for_another_protocol_is_answered_and_so_is_what_follows() -> None:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n"
        writer.write(asked + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + asked + b"\r\n")
        assert [(await read(reader))[0] for _ in range(2)] == [200, 200]

    talk(front_of(HeldEngine()), one)


def test_a_request_for_answers_may_ask_for_another_protocol_and_keeps_its_body() -> None:
    engine = HeldEngine()
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for rows in (2, 3):  # the second by the parser that the first one left
            writer.write(raw(request(rows), *upgrade))
            await until(lambda: engine.held)
            engine.answer()
            assert (await read(reader))[2]["outputs"][0]["shape"] == [rows]

    talk(front_of(engine), one)


CHUNKED = (
    b"POST /v2/models/sums/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
)


def test_headers_behind_a_body_change_nothing() -> None:
    engine = HeldEngine()
    body = json.dumps(request()).encode()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"\r\n%x\r\n" % len(body) + body)
        writer.write(b"\r\n0\r\nx-falaj-slot: shadow\r\nContent-Encoding: gzip\r\n\r\n")
        await until(lambda: engine.held)
        assert engine.held[0][0].slot == "stable"
        engine.answer()
        assert (await read(reader))[0] == 200

    talk(front_of(engine), one)


@pytest.mark.parametrize("line", [b"a: b\r\n", b"a" * 1000])
def test_headers_behind_a_body_are_bounded(line: bytes) -> None:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"\r\n4\r\nbody\r\n0\r\n")
        with suppress(ConnectionError):
            for _ in range(100_000 // len(line)):
                writer.write(line)
                await writer.drain()
        assert (await read(reader))[0] == 431

    talk(front_of(HeldEngine()), one)


@pytest.mark.usefixtures("small_heads")
def test_a_chunked_body_in_any_pieces_is_taken_whole() -> None:
    engine = HeldEngine()
    body = json.dumps(request()).encode() + b" " * 100_000

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for end in (b"\r\n0\r\n\r\n", b"\r\n0\r\na: b\r\n\r\n"):
            chunks = b"%x\r\n" % 50_000 + body[:50_000] + b"\r\n%x\r\n" % (len(body) - 50_000)
            whole = CHUNKED + b"\r\n" + chunks + body[50_000:] + end
            for start in range(0, len(whole), 7001):
                writer.write(whole[start : start + 7001])
                await writer.drain()
            await until(lambda: engine.held)
            engine.answer()
            assert (await read(reader))[0] == 200

    talk(front_of(engine), one)


@pytest.mark.parametrize("slot", ["candidate", "shadow"])
def test_a_request_that_cannot_be_read_is_told_of_its_own_slot(slot: str) -> None:
    """Releases hold a refusal against the version that the request was for."""
    told: list[tuple[str, str]] = []

    class BySlot(Noting):
        def refused(self, call: Call, error: ServingError) -> None:
            told.append((call.slot, error.reason))

    engine = HeldEngine()
    engine.slots["candidate"] = engine.slots["shadow"] = "2"
    front = front_of(engine)
    front.observers = (BySlot(),)

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = request()
        asked["inputs"].pop()
        writer.write(raw(asked, f"x-falaj-slot: {slot}"))
        assert (await read(reader))[0] == 400

    talk(front, one)
    assert told == [(slot, "bad_request")]


@pytest.mark.parametrize(
    ("was", "becomes"),
    [('"timeout": 0', '"timeout": 1' + "0" * 400), ('"shape": [1, 2]', '"shape": [1' + ", 1" * 99)],
)
def test_numbers_beyond_all_bounds_are_the_clients_fault(was: str, becomes: str) -> None:
    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.dumps({**request(), "parameters": {"timeout": 0}})
        assert was in asked
        writer.write(raw(asked.replace(was, becomes + "]" * was.endswith("]")).encode()))
        assert (await read(reader))[0] == 400

    talk(front_of(HeldEngine()), one)


def test_over_tls_the_same_is_answered_and_refused(tmp_path: Path) -> None:
    engine = HeldEngine()
    authority = ensure_authority(tmp_path, "authority")
    pair = ensure_certificate(tmp_path, "server", authority, ("localhost",), "server")
    server = server_context(TlsConfig(certificate=pair.certificate, key=pair.key))
    client = ssl.create_default_context(cafile=str(authority.certificate))

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw(request(2)) + raw(request(3)))
        for rows in (2, 3):
            await until(lambda: engine.held)
            engine.answer()
            assert (await read(reader))[2]["outputs"][0]["shape"] == [rows]
        writer.write(raw(b"x" * 100_000))
        assert (await read(reader))[0] == 413
        assert await reader.read() == b""

    talk(front_of(engine, max_body_bytes=90_000), one, tls=(server, client))
