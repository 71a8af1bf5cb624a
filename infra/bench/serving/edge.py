"""What the edge costs: CPU of Envoy beside that of a small server that does the same without it.

Both ways speak TLS 1.3 to the client and check its token. Alone, the server does so itself. Behind
the edge Envoy does, with roles, limits, a split and a log line, and the server again over mutual
TLS. Client CPU is not counted.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import psutil
import yaml

from infra.bench.figures import Measured, at_most
from infra.bench.parts import Bench
from infra.bench.serving.gateway import (
    ISSUER,
    Signer,
    connected,
    envoy,
    read_answer,
    request,
    running,
    write_settings,
)
from infra.gateway.config import GatewayFiles
from infra.gateway.prepare import GatewayTraffic, server_tls
from infra.orchestration.embedded import free_port

MODEL = "flight-delay"
CONNECTIONS, REQUESTS, ROUNDS = 16, 2000, 5
BODY = b'{"inputs": [{"name": "x", "shape": [1, 16], "datatype": "FP32", "data": [' + b"0.5, " * 15
BODY += b"0.5]}]}"
BOUND = 4.0
"""The server is next to nothing here, so this is the dearest that an edge can look."""


def figures(bench: Bench) -> Measured:
    """CPU of a request, by the median of rounds that take turns."""
    rounds, num_requests = bench.size((ROUNDS, REQUESTS), (1, 40 * CONNECTIONS))
    home, signer = bench.folder / "home", Signer(ISSUER)
    ports = {name: free_port() for name in ("edge", "http", "grpc", "alone")}
    _write_settings(home, signer, ports)
    with ExitStack() as stack:
        security = GatewayFiles(home).server_security_file
        behind = stack.enter_context(_server(security, ports["http"], bench.folder))
        alone = stack.enter_context(_server(home / "alone.yaml", ports["alone"], bench.folder))
        proxy = stack.enter_context(envoy(home, bench.folder / "envoy.log"))
        GatewayTraffic(home).set_shares(MODEL, 0.1, 0.0)
        content = request(MODEL, signer, BODY)

        def taken() -> list[float]:
            by_itself = _cpu_us(ports["alone"], content, num_requests, [alone])
            return by_itself + _cpu_us(ports["edge"], content, num_requests, [behind, proxy])

        taken()  # not counted
        rows = [taken() for _ in range(rounds)]
    alone_us, server_us, envoy_us = (statistics.median(us) for us in zip(*rows, strict=True))
    told = f"{envoy_us:.0f} us Envoy, {server_us:.0f} us server behind it, {alone_us:.0f} us alone"
    ratio = statistics.median((server + proxy) / alone for alone, server, proxy in rows)
    return [at_most("CPU with the edge to server-only, TLS and token", ratio, BOUND, told)]


def _cpu_us(
    port: int, content: bytes, num_requests: int, processes: Sequence[psutil.Process]
) -> list[float]:
    """CPU microseconds of each process, one request."""
    before = [_cpu_s(process) for process in processes]
    asyncio.run(_load(port, content, num_requests))
    return [
        1e6 * (_cpu_s(process) - earlier) / num_requests
        for process, earlier in zip(processes, before, strict=True)
    ]


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

    await asyncio.gather(*[ask(num_requests // CONNECTIONS) for _ in range(CONNECTIONS)])


def _write_settings(home: Path, signer: Signer, ports: dict[str, int]) -> None:
    security = write_settings(home, MODEL, signer, ports)
    tls = server_tls(GatewayFiles(home)).model_copy(update={"client_ca": None})
    (issuer,) = security["issuers"]
    keys = {"keys": str(home / "serving" / "keys.json")}
    alone = security | {"issuers": [issuer | keys], "tls": tls.model_dump(mode="json")}
    (home / "alone.yaml").write_text(yaml.safe_dump(alone))


def _server(security: Path, port: int, scratch: Path) -> AbstractContextManager[psutil.Process]:
    module = "infra.bench.serving.v2_server"
    command = [sys.executable, "-m", module, str(security), str(port), str(free_port())]

    def listens(process: psutil.Process) -> bool:
        return any(
            c.status == psutil.CONN_LISTEN and c.laddr.port == port
            for c in process.net_connections(kind="tcp")
        )

    return running(command, scratch / f"server-{port}.log", listens)
