"""What the edge costs: CPU of Envoy beside that of a small server that does the same without it.

Both ways speak TLS 1.3 to the client and check its token. Alone, the server does so itself. Behind
the edge Envoy does, with roles, limits, a split and a log line, and the server again over mutual
TLS. Client CPU is not counted.
"""

from __future__ import annotations

import asyncio
import ssl
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from infra.bench.figures import Figure, at_most
from infra.edge.admin import Admin
from infra.edge.config import read_plan
from infra.edge.place import EdgePlace
from infra.edge.prepare import prepare, server_tls
from infra.edge.traffic import EdgeTraffic
from tasks.settings import PROJECT_ROOT
from tests.support.host.processes import wait_until
from tests.support.services.servers import free_port
from tests.support.services.signing import AUDIENCE, Signer

MODEL = "flight-delay"
CONNECTIONS, REQUESTS, ROUNDS = 16, 2000, 5
ISSUER = "https://issuer.test"
PLENTY = {"per_s": 1e6, "burst": 1_000_000}
START_LIMIT_S = 120
BODY = b'{"inputs": [{"name": "x", "shape": [1, 16], "datatype": "FP32", "data": [' + b"0.5, " * 15
BODY += b"0.5]}]}"
BOUND = 4.0
"""The server is next to nothing here, so this is the dearest that an edge can look."""


@dataclass(frozen=True)
class EdgeCost:
    """CPU microseconds of one request, medians of rounds that take turns."""

    alone_us: float
    server_us: float
    envoy_us: float
    ratio: float


def edge_figures() -> list[Figure]:
    """The figure of the table."""
    cost = measure_edge()
    said = (
        f"{cost.envoy_us:.0f} us Envoy, {cost.server_us:.0f} us server behind it, "
        f"{cost.alone_us:.0f} us server alone"
    )
    return [at_most("CPU with the edge to server-only, TLS and token", cost.ratio, BOUND, said)]


def measure_edge() -> EdgeCost:
    """Start server, server behind the edge and Envoy, and ask them in turns."""
    with tempfile.TemporaryDirectory(prefix="falaj-edge-") as scratch, ExitStack() as stack:
        home = Path(scratch) / "home"
        signer = Signer(ISSUER)
        ports = {name: free_port() for name in ("edge", "http", "alone")}
        _write_settings(home, signer, ports)
        behind = stack.enter_context(
            _server(EdgePlace(home).server_security_file, ports["http"], Path(scratch))
        )
        alone = stack.enter_context(_server(home / "alone.yaml", ports["alone"], Path(scratch)))
        envoy = stack.enter_context(_envoy(home, Path(scratch)))
        EdgeTraffic(home).set_shares(MODEL, 0.1, 0.0)
        request = _request(signer)
        first = _Target(ports["alone"], (alone,))
        second = _Target(ports["edge"], (behind, envoy))
        rounds = [(first.ask(request), second.ask(request)) for _ in range(ROUNDS + 1)][1:]
    return EdgeCost(
        alone_us=statistics.median(a[0] for a, _ in rounds),
        server_us=statistics.median(b[0] for _, b in rounds),
        envoy_us=statistics.median(b[1] for _, b in rounds),
        ratio=statistics.median(sum(b) / sum(a) for a, b in rounds),
    )


@dataclass(frozen=True)
class _Target:
    port: int
    processes: tuple[psutil.Process, ...]

    def ask(self, request: bytes) -> list[float]:
        """CPU microseconds of each process, one request."""
        before = [_cpu_s(process) for process in self.processes]
        asyncio.run(_load(self.port, request))
        after = [_cpu_s(process) for process in self.processes]
        return [1e6 * (b - a) / REQUESTS for a, b in zip(before, after, strict=True)]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _load(port: int, request: bytes) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    async def ask(count: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        for _ in range(count):
            writer.write(request)
            await _read_answer(reader)
        writer.close()
        await writer.wait_closed()

    each = [REQUESTS // CONNECTIONS] * CONNECTIONS
    await asyncio.gather(*(ask(count) for count in each))


async def _read_answer(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"expected 200, got {head[:200]!r}")
    if b"transfer-encoding: chunked" in head.lower():
        while size := int(await reader.readuntil(b"\r\n"), 16):
            await reader.readexactly(size + 2)
        await reader.readexactly(2)
        return
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    await reader.readexactly(int(length))


def _request(signer: Signer) -> bytes:
    head = (
        f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nhost: localhost\r\n"
        f"authorization: Bearer {signer.token(f'infer:{MODEL}')}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
    )
    return head.encode() + BODY


def _write_settings(home: Path, signer: Signer, ports: dict[str, int]) -> None:
    (home / "edge").mkdir(parents=True)
    (home / "serving").mkdir()
    (home / "serving" / "keys.json").write_text(signer.keys())
    issuer = {"issuer": ISSUER, "audience": AUDIENCE, "keys": "keys.json"}
    security = {"issuers": [issuer], "limits": {"client": PLENTY}}
    edge = {
        "models": {MODEL: {}},
        "listen": f"127.0.0.1:{ports['edge']}",
        "http": [f"127.0.0.1:{ports['http']}"],
        "grpc": [f"127.0.0.1:{ports['http']}"],
        "limit": PLENTY,
        "address_limit": PLENTY,
        "workers": 1,
    }
    (home / "serving" / "security.yaml").write_text(yaml.safe_dump(security))
    (home / "edge" / "edge.yaml").write_text(yaml.safe_dump(edge))
    prepare(read_plan(home))
    tls = server_tls(EdgePlace(home)).model_copy(update={"client_ca": None})
    keys = {"keys": str(home / "serving" / "keys.json")}
    alone = security | {"issuers": [issuer | keys], "tls": tls.model_dump(mode="json")}
    (home / "alone.yaml").write_text(yaml.safe_dump(alone))


@contextmanager
def _server(security: Path, port: int, scratch: Path) -> Iterator[psutil.Process]:
    module = "tests.support.serving.v2_app"
    command = [sys.executable, "-m", module, str(security), str(port), str(free_port())]
    with _process(command, scratch / f"server-{port}.log") as process:
        wait_until(lambda: _listens(process, port), "the server listens", START_LIMIT_S)
        yield process


@contextmanager
def _envoy(home: Path, scratch: Path) -> Iterator[psutil.Process]:
    command = [sys.executable, "-m", "infra.edge", "--home", str(home), "run"]
    admin = Admin(EdgePlace(home).folder)
    with _process(command, scratch / "envoy.log") as process:
        wait_until(admin.is_ready, "Envoy is ready", START_LIMIT_S)
        (child,) = process.children()
        yield child


@contextmanager
def _process(command: list[str], log: Path) -> Iterator[psutil.Process]:
    with log.open("ab") as output:
        started = subprocess.Popen(command, stdout=output, stderr=output, cwd=PROJECT_ROOT)
    try:
        yield psutil.Process(started.pid)
    finally:
        started.terminate()
        started.wait()


def _listens(process: psutil.Process, port: int) -> bool:
    return any(
        c.status == psutil.CONN_LISTEN and c.laddr.port == port
        for c in process.net_connections(kind="tcp")
    )
