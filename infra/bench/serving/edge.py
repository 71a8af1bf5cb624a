"""What the edge costs: CPU of Envoy beside that of a server that does the same without it.

Both ways speak TLS 1.3 to the client and check its token. Alone, the server does so itself. Behind
the edge Envoy does, with roles, limits, a split and a log line, and the server again over mutual
TLS. Client CPU is not counted.
"""

import shutil
import statistics
from contextlib import ExitStack
from functools import partial

import psutil
import yaml

from infra.bench.figures import Measured, at_most, interleaved
from infra.bench.parts import Bench
from infra.bench.serving import installation
from infra.bench.serving.clients import cpu_us, request
from infra.bench.serving.http_request import UNLOGGED, one_row
from infra.gateway.config import GatewayFiles
from infra.gateway.prepare import GatewayTraffic, server_tls
from infra.orchestration.embedded import free_port


def figures(bench: Bench) -> Measured:
    """CPU of a request, by the median of interleaved rounds."""
    rounds, seconds = bench.size((5, 1.5), (1, 0.3))
    home, alone_home, signer = bench.folder / "home", bench.folder / "alone", installation.Signer()
    ports = {name: free_port() for name in ("edge", "http", "grpc", "alone")}
    installation.BenchHome(home, installation.Tabular).add(7, promote=True)
    shutil.copytree(home, alone_home)
    security = installation.write_settings(home, signer, ports)
    tls = server_tls(GatewayFiles(home)).model_copy(update={"client_ca": None})
    security["tls"] = tls.model_dump(mode="json")
    (alone_home / "serving").mkdir()
    (alone_home / "serving" / "security.yaml").write_text(yaml.safe_dump(security))
    with ExitStack() as stack:
        own = {"http": ports["alone"]}
        alone = stack.enter_context(installation.serving(alone_home, own, **UNLOGGED))
        behind = stack.enter_context(
            installation.serving(home, {"http": ports["http"]}, security={"edge": True}, **UNLOGGED)
        )
        proxy = stack.enter_context(installation.envoy(home))
        GatewayTraffic(home).set_shares(installation.MODEL, 0.1, 0.0)
        asked = request(installation.MODEL, one_row(), signer.token(f"infer:{installation.MODEL}"))

        def taken(port: str, *processes: psutil.Process) -> list[float]:
            return cpu_us(processes, ports[port], asked, 16, seconds, tls=True)

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
    return [at_most("CPU with the edge to server-only, TLS and token", ratio, 4.0, evidence)]
