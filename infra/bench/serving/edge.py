"""What the edge costs: CPU of Envoy beside that of a server that does the same without it.

Both ways speak TLS 1.3 to the client and check its token. Alone, the server does so itself. Behind
the edge Envoy does, with roles, limits, a split and a log line, and the server again over mutual
TLS. Client CPU is not counted.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

import psutil
import yaml

from infra.bench.figures import Measured, at_most, interleaved
from infra.bench.parts import Bench
from infra.bench.serving.gateway import Signer, envoy, request, write_settings
from infra.bench.serving.http_request import one_row
from infra.bench.serving.onnx_server import MODEL
from infra.bench.serving.processes import cpu_us, listens, running
from infra.bench.serving.served_models import write_program
from infra.gateway.config import GatewayFiles
from infra.gateway.prepare import GatewayTraffic, server_tls
from infra.orchestration.embedded import free_port

CONNECTIONS, SECONDS, ROUNDS = 16, 1.5, 5
BOUND = 4.0


def figures(bench: Bench) -> Measured:
    """CPU of a request, by the median of interleaved rounds."""
    rounds, seconds = bench.size((ROUNDS, SECONDS), (1, 0.3))
    home, signer = bench.folder / "home", Signer()
    ports = {name: free_port() for name in ("edge", "http", "grpc", "alone")}
    _write_settings(home, signer, ports)
    model = write_program(bench.folder / "model.onnx")
    with ExitStack() as stack:

        def server(security: Path, name: str) -> psutil.Process:
            return stack.enter_context(_server(model, security, ports[name], bench.folder / name))

        behind = server(GatewayFiles(home).server_security_file, "http")
        alone = server(home / "alone.yaml", "alone")
        proxy = stack.enter_context(envoy(home, bench.folder / "envoy.log"))
        GatewayTraffic(home).set_shares(MODEL, 0.1, 0.0)
        asked = request(MODEL, one_row(), signer)

        def taken(port: str, *processes: psutil.Process) -> list[float]:
            return cpu_us(processes, ports[port], asked, CONNECTIONS, seconds, tls=True)

        ways = {
            "alone": partial(taken, "alone", alone),
            "edge": partial(taken, "edge", behind, proxy),
        }
        found = interleaved(ways, rounds)
    rows = [(*one, *two) for one, two in zip(found["alone"], found["edge"], strict=True)]
    alone_us, server_us, envoy_us = (statistics.median(us) for us in zip(*rows, strict=True))
    evidence = (
        f"{envoy_us:.0f} us Envoy, {server_us:.0f} us server behind it, {alone_us:.0f} us alone"
    )
    ratio = statistics.median((server + proxy) / alone for alone, server, proxy in rows)
    return [at_most("CPU with the edge to server-only, TLS and token", ratio, BOUND, evidence)]


def _write_settings(home: Path, signer: Signer, ports: dict[str, int]) -> None:
    security = write_settings(home, MODEL, signer, ports)
    tls = server_tls(GatewayFiles(home)).model_copy(update={"client_ca": None})
    (issuer,) = security["issuers"]
    keys = {"keys": str(home / "serving" / "keys.json")}
    alone = security | {"issuers": [issuer | keys], "tls": tls.model_dump(mode="json")}
    (home / "alone.yaml").write_text(yaml.safe_dump(alone))


def _server(
    model: Path, security: Path, port: int, folder: Path
) -> AbstractContextManager[psutil.Process]:
    program = [sys.executable, "-m", "infra.bench.serving.onnx_server"]
    command = [*program, str(model), str(folder), str(port), str(security)]
    return running(command, folder.with_suffix(".log"), partial(listens, port))
