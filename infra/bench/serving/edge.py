"""What the edge costs: CPU of Envoy beside that of a small server that does the same without it.

Both ways speak TLS 1.3 to the client and check its token. Alone, the server does so itself. Behind
the edge Envoy does, with roles, limits, a split and a log line, and the server again over mutual
TLS. Client CPU is not counted.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from infra.bench.figures import Measured, at_most
from infra.bench.parts import Bench, wait_until
from infra.bench.serving.gateway import (
    ISSUER,
    START_LIMIT_S,
    connected,
    envoy,
    read_answer,
    request,
    running,
    write_settings,
)
from infra.bench.serving.signer import Signer
from infra.gateway.config import GatewayFiles
from infra.gateway.prepare import GatewayTraffic, server_tls
from infra.orchestration.embedded import free_port

MODEL = "flight-delay"
CONNECTIONS, REQUESTS, ROUNDS = 16, 2000, 5
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


def figures(bench: Bench) -> Measured:
    """CPU of a request, by the median of rounds that take turns."""
    rounds, num_requests = bench.size((ROUNDS, REQUESTS), (1, 40 * CONNECTIONS))
    cost = measure_edge(bench.folder, rounds, num_requests)
    said = (
        f"{cost.envoy_us:.0f} us Envoy, {cost.server_us:.0f} us server behind it, "
        f"{cost.alone_us:.0f} us server alone"
    )
    return [at_most("CPU with the edge to server-only, TLS and token", cost.ratio, BOUND, said)]


def measure_edge(scratch: Path, rounds: int, num_requests: int) -> EdgeCost:
    """Start server, server behind the edge and Envoy, and ask them in turns."""
    with ExitStack() as stack:
        home, signer = scratch / "home", Signer(ISSUER)
        ports = {name: free_port() for name in ("edge", "http", "grpc", "alone")}
        _write_settings(home, signer, ports)
        security = GatewayFiles(home).server_security_file
        behind = stack.enter_context(_server(security, ports["http"], scratch))
        alone = stack.enter_context(_server(home / "alone.yaml", ports["alone"], scratch))
        proxy = stack.enter_context(envoy(home, scratch / "envoy.log"))
        GatewayTraffic(home).set_shares(MODEL, 0.1, 0.0)
        content = request(MODEL, signer, BODY)
        first = _Target(ports["alone"], (alone,), num_requests)
        second = _Target(ports["edge"], (behind, proxy), num_requests)
        taken = [(first.ask(content), second.ask(content)) for _ in range(rounds + 1)][1:]
    return EdgeCost(
        alone_us=statistics.median(a[0] for a, _ in taken),
        server_us=statistics.median(b[0] for _, b in taken),
        envoy_us=statistics.median(b[1] for _, b in taken),
        ratio=statistics.median(sum(b) / sum(a) for a, b in taken),
    )


@dataclass(frozen=True)
class _Target:
    port: int
    processes: tuple[psutil.Process, ...]
    num_requests: int

    def ask(self, content: bytes) -> list[float]:
        """CPU microseconds of each process, one request."""
        before = [_cpu_s(process) for process in self.processes]
        asyncio.run(_load(self.port, content, self.num_requests))
        after = [_cpu_s(process) for process in self.processes]
        return [1e6 * (b - a) / self.num_requests for a, b in zip(before, after, strict=True)]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _load(port: int, content: bytes, num_requests: int) -> None:
    async def ask(count: int) -> None:
        reader, writer = await connected(port)
        for _ in range(count):
            writer.write(content)
            await read_answer(reader)
        writer.close()
        await writer.wait_closed()

    each = [num_requests // CONNECTIONS] * CONNECTIONS
    await asyncio.gather(*(ask(count) for count in each))


def _write_settings(home: Path, signer: Signer, ports: dict[str, int]) -> None:
    security = write_settings(home, MODEL, signer, ports)
    tls = server_tls(GatewayFiles(home)).model_copy(update={"client_ca": None})
    (issuer,) = security["issuers"]
    keys = {"keys": str(home / "serving" / "keys.json")}
    alone = security | {"issuers": [issuer | keys], "tls": tls.model_dump(mode="json")}
    (home / "alone.yaml").write_text(yaml.safe_dump(alone))


@contextmanager
def _server(security: Path, port: int, scratch: Path) -> Iterator[psutil.Process]:
    module = "infra.bench.serving.v2_server"
    command = [sys.executable, "-m", module, str(security), str(port), str(free_port())]
    with running(command, scratch / f"server-{port}.log") as process:
        wait_until(lambda: _listens(process, port), "the server listens", START_LIMIT_S)
        yield process


def _listens(process: psutil.Process, port: int) -> bool:
    return any(
        c.status == psutil.CONN_LISTEN and c.laddr.port == port
        for c in process.net_connections(kind="tcp")
    )
