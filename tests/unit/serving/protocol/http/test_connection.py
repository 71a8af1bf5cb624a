"""The connection's own protocol against an engine whose answers the test holds back."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.config import ServingConfig, checked_config
from serving.errors import ForbiddenError, OverloadedError
from serving.interfaces import Answer, Call, Done, Served
from serving.protocol.front import Front
from serving.protocol.http import listener
from serving.protocol.http.listener import Listener, bound_socket, public_listener
from serving.security.certificates import ensure_authority, ensure_certificate
from serving.security.config import TlsConfig
from serving.security.guard import OpenGuard
from serving.security.tls import RenewingTls
from tests.support.serving.guards import StrictGuard
from tests.support.serving.inline_engine import InlineEngine
from tests.support.serving.serving_clients import raw, request
from tests.support.serving.standins import Witness, until

pytestmark = pytest.mark.anyio
SERVED = Served("sums", "1", "onnx-fp32", "stable", "cpu", "openvino-int8")


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

    def answer(self) -> None:
        call, done = self.held.pop(0)
        done(call, Answer({"score": np.full(call.num_rows, 7, np.float32)}, SERVED))


def front_of(engine: HeldEngine, guard: Any = None, **http: Any) -> Front:
    config: ServingConfig = checked_config({"http": http, "stop_s": 2}, "the test")
    return Front(engine, guard or OpenGuard(config), config, (Witness(),))


class Client:
    """One connection to a listener, and what the engine behind it holds."""

    listener: Listener

    def __init__(self, engine: Any, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]):
        self.engine = engine
        self.reader, self.writer = streams
        self.address = self.writer.get_extra_info("peername")

    def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    async def read(self) -> tuple[int, dict[str, str], Any]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(head[0].split()[1]), headers, json.loads(body) if body else None

    async def statuses(self, count: int) -> list[int]:
        return [(await self.read())[0] for _ in range(count)]

    async def held(self) -> Call:
        """The call that the engine has, once it has one."""
        await until(lambda: self.engine.held)
        call: Call = self.engine.held[0][0]
        return call

    async def answered(self) -> tuple[int, dict[str, str], Any]:
        """Let the engine answer."""
        await self.held()
        self.engine.answer()
        return await self.read()

    async def has_ended(self) -> bool:
        return await self.reader.read() == b""


@asynccontextmanager
async def listening(front: Front, tls: Sequence[Any] = (None, None)) -> AsyncIterator[Client]:
    """Run a listener; gives a connection to it. `tls`: its and its client's."""
    listener, sock = public_listener(front, tls[0]), bound_socket("127.0.0.1", 0, "the test")
    serving = asyncio.ensure_future(listener.serve(sock))
    port = sock.getsockname()[1]
    client = Client(front.engine, await asyncio.open_connection("localhost", port, ssl=tls[1]))
    client.listener = listener
    try:
        async with asyncio.timeout(60):
            yield client
    finally:
        client.writer.close()
        listener.stop()
        await serving


def told_of(front: Front) -> list[tuple[str, ...]]:
    (witness,) = front.observers
    return [(call.model, call.track, error.reason) for call, error in witness.refusals]


PAGE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def test_a_call_says_what_the_request_said() -> None:
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    headers = ["X-Request-Id: r-1", "x-falaj-timeout-ms: 2000", f"traceparent: {trace}"]
    path = "/v2/models/sums/versions/1/infer?x=1"
    async with listening(front_of(HeldEngine())) as client:
        client.send(raw(request(2), *headers, "x-falaj-slot: stable", path=path))
        call = await client.held()
        assert (call.model, call.version, call.track, call.num_rows) == ("sums", "1", "stable", 2)
        assert (call.request_id, call.trace) == ("r-1", trace)
        assert call.deadline == pytest.approx(call.arrived + 2)
        status, seen, body = await client.answered()
        assert (status, body["outputs"][0]["data"]) == (200, [7, 7])
        assert seen["x-falaj-fell-over"] == "openvino-int8"
        for told in ("99999999", "0"):  # the longest time is the configuration's
            client.send(raw(request(), f"x-falaj-timeout-ms: {told}"))
            call = await client.held()
            assert call.deadline == pytest.approx(call.arrived + 30)
            await client.answered()


async def test_a_call_whose_client_has_gone_says_so_and_its_answer_goes_nowhere() -> None:
    engine = HeldEngine()
    front = front_of(engine)
    async with listening(front) as leaver:
        other = Client(engine, await asyncio.open_connection(*leaver.address))
        leaver.send(raw(request()) * 2)
        call = await leaver.held()
        assert not call.is_gone
        leaver.writer.transport.abort()
        await until(lambda: call.is_gone)
        engine.answer()
        assert not engine.held  # the one behind it was never started
        other.send(raw(request()))
        assert (await other.answered())[0] == 200
        other.writer.close()
    assert front.buffered == 0


async def test_a_pipelined_request_starts_when_the_one_before_it_is_answered() -> None:
    second = raw(request(3))
    async with listening(front_of(HeldEngine())) as client:
        client.send(raw(request(2)), PAGE, second[:50])
        await client.held()
        client.send(second[50:], b"nonsense\r\n\r\n")
        await asyncio.sleep(0.05)
        assert len(client.engine.held) == 1
        assert (await client.answered())[2]["outputs"][0]["shape"] == [2]
        assert (await client.read())[2] == {"live": True}
        assert (await client.answered())[2]["outputs"][0]["shape"] == [3]
        status, headers, _ = await client.read()
        assert (status, headers["connection"]) == (400, "close")
        assert await client.has_ended()


async def test_refusals_before_the_engine_keep_the_connection_and_are_told() -> None:
    guard = StrictGuard()
    front = front_of(HeldEngine(), guard)
    me = "X-Who: me"
    async with listening(front) as client:
        client.send(raw(request()), raw(request(), "X-Who: broken"))
        assert await client.statuses(2) == [403, 500]
        client.send(raw(request(), "X-Who: often"))
        status, headers, _ = await client.read()
        assert (status, headers["retry-after"]) == (429, "3")
        client.send(raw({"inputs": []}, me), raw(request(), me, "x-falaj-timeout-ms: 1e3"))
        client.send(raw(request(), me, "Content-Encoding: gzip"))
        assert await client.statuses(3) == [400, 400, 415]
        client.send(raw(request(), me))
        assert (await client.held()).subject == "me"
        assert (await client.answered())[0] == 200
        client.send(b"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await client.statuses(1) == [403]
    assert (guard.asked[0], guard.asked[-1]) == (("infer", "sums"), ("admin", None))
    reasons = " ".join(reason for *_, reason in told_of(front))
    assert reasons == "forbidden internal rate_limited bad_request bad_request unsupported_body"


async def test_a_call_that_would_wait_too_long_is_refused_before_its_body_is_looked_at() -> None:
    engine = HeldEngine()
    front = front_of(engine)
    async with listening(front) as client:
        engine.refuses = OverloadedError("busy", 1.2)
        client.send(raw(b"no JSON at all"))
        status, headers, body = await client.read()
        assert (status, headers["retry-after"], body) == (503, "2", {"error": "busy"})
        engine.refuses = None
        client.send(raw(request()))
        assert (await client.answered())[0] == 200
    assert told_of(front) == [("sums", "stable", "overloaded")]


@pytest.mark.parametrize("size", [100, 100_000])
async def test_a_stranger_that_waits_to_be_told_to_go_on_is_refused_before_its_body_is_sent(
    size: int,
) -> None:
    async with listening(front_of(HeldEngine(), StrictGuard())) as client:
        client.send(raw(b"x" * size, "Expect: 100-continue")[:-size])
        assert await client.statuses(1) == [403]
        assert await client.has_ended()


async def test_bodies_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.protocol.http.connection.MAX_BUFFERED_BYTES", 5000)
    front = front_of(HeldEngine())
    async with listening(front) as client:
        client.send(raw(b"x" * 10_000)[:-1000])
        status, headers, _ = await client.read()
        assert (status, headers["retry-after"]) == (503, "1")
    assert front.buffered == 0


async def test_a_fault_of_ours_is_a_500_and_the_server_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = HeldEngine()
    async with listening(front_of(engine)) as client:
        engine.broken = True
        client.send(raw(request()))
        assert (await client.read())[0] == 500
        engine.broken = False
        client.send(raw(request()))
        await client.held()
        call, done = engine.held.pop()
        done(call, Answer({"other": np.zeros(1, np.float32)}, SERVED))
        assert (await client.read())[0] == 500
        client.send(raw(request()))
        assert (await client.answered())[0] == 200
    assert "could not be taken" in caplog.text


async def test_a_request_on_its_way_when_the_process_ends_is_answered_and_is_the_last() -> None:
    engine = HeldEngine()
    front = front_of(engine)
    async with listening(front) as last:
        idle = Client(engine, await asyncio.open_connection(*last.address))
        await until(lambda: len(last.listener.connections) == 2)
        front.stopping = True
        last.listener.stop()
        last.send(raw(request(2)), raw(request(3)))
        status, headers, body = await last.answered()
        assert (status, headers["connection"]) == (200, "close")
        assert body["outputs"][0]["shape"] == [2]
        assert await last.has_ended()
        assert await idle.has_ended()
        assert not engine.held
        idle.writer.close()


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


CHUNKED = (
    b"POST /v2/models/sums/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
)


@pytest.mark.parametrize("line", [b"a: b\r\n", b"a" * 1000])
async def test_headers_behind_a_body_are_bounded(line: bytes) -> None:
    async with listening(front_of(HeldEngine())) as client:
        client.send(CHUNKED, b"\r\n4\r\nbody\r\n0\r\n")
        with suppress(ConnectionError):
            for _ in range(100_000 // len(line)):
                client.send(line)
                await client.writer.drain()
        assert await client.statuses(1) == [431]


@pytest.mark.parametrize("track", ["candidate", "shadow"])
async def test_a_request_that_cannot_be_read_is_told_of_its_own_track(track: str) -> None:
    """Releases hold a refusal against the version that the request was for."""
    engine = HeldEngine()
    engine.tracks["candidate"] = engine.tracks["shadow"] = "2"
    front = front_of(engine)
    asked = request()
    asked["inputs"].pop()
    async with listening(front) as client:
        client.send(raw(asked, f"x-falaj-slot: {track}"))
        assert await client.statuses(1) == [400]
    assert told_of(front) == [("sums", track, "bad_request")]


@pytest.fixture
def tls(tmp_path: Path) -> tuple[RenewingTls, ssl.SSLContext]:
    """A listener's, and that of a client who trusts it."""
    authority = ensure_authority(tmp_path, "authority")
    pair = ensure_certificate(tmp_path, "server", authority, ("localhost",), "server")
    server = RenewingTls(TlsConfig(certificate=pair.certificate, key=pair.key))
    return server, ssl.create_default_context(cafile=str(authority.certificate))


async def test_over_tls_the_same_is_answered_and_refused(tls: Sequence[Any]) -> None:
    front = front_of(HeldEngine(), max_body_bytes=90_000)
    async with listening(front, tls) as client:
        client.send(raw(request(2)), raw(request(3)))
        for rows in (2, 3):
            assert (await client.answered())[2]["outputs"][0]["shape"] == [rows]
        client.send(raw(b"x" * 100_000))
        assert await client.statuses(1) == [413]
        assert await client.has_ended()


async def test_a_fault_of_looking_at_tls_files_ends_no_listener_and_looks_are_rare(
    tls: Sequence[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def look() -> bool:
        looks.append(1)
        raise ValueError("a fault of ours")

    monkeypatch.setattr(tls[0], "look", look)
    monkeypatch.setattr(listener, "SWEEP_S", 0.01)
    monkeypatch.setattr(listener, "LOOK_S", 0.15)
    async with listening(front_of(HeldEngine()), tls) as client:
        await asyncio.sleep(0.4)
        assert 1 <= len(looks) < 10  # sweeps are 40
        client.send(raw(b"{}"))
        assert await client.statuses(1) == [400]
