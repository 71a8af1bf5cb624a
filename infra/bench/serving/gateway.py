"""What stands before a server in the benches: Envoy, its settings, and requests with a token."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from infra.bench.parts import wait_until
from infra.bench.serving.signer import AUDIENCE, Signer
from infra.gateway.config import GatewayFiles, read_plan
from infra.gateway.envoy import Admin
from infra.gateway.prepare import prepare
from tasks.kernel.settings import PROJECT_ROOT

ISSUER = "https://issuer.test"
PLENTY = {"per_s": 1e6, "burst": 1_000_000}
START_LIMIT_S = 180
HEALTHY = r"cluster\.http-(stable|candidate)\.membership_healthy"


def write_settings(home: Path, model: str, signer: Signer, ports: Mapping[str, int]) -> Any:
    """Let Envoy listen at the port `edge` and ask that of `http`; returns who may ask."""
    (home / "edge").mkdir(parents=True)
    (home / "serving").mkdir()
    (home / "serving" / "keys.json").write_text(signer.keys())
    issuer = {"issuer": ISSUER, "audience": AUDIENCE, "keys": "keys.json"}
    security = {"issuers": [issuer], "limits": {"client": PLENTY}}
    edge = {
        "models": {model: {}},
        "listen": f"127.0.0.1:{ports['edge']}",
        "http": [f"127.0.0.1:{ports['http']}"],
        "grpc": [f"127.0.0.1:{ports['grpc']}"],
        "limit": PLENTY,
        "address_limit": PLENTY,
        "workers": 1,
    }
    (home / "serving" / "security.yaml").write_text(yaml.safe_dump(security))
    (home / "edge" / "edge.yaml").write_text(yaml.safe_dump(edge))
    prepare(read_plan(home))
    return security


@contextmanager
def envoy(home: Path, log: Path) -> Iterator[psutil.Process]:
    """Envoy, once it is ready and has found its server well."""
    command = [sys.executable, "-m", "falaj", "--home", str(home), "gateway", "run"]
    admin = Admin(GatewayFiles(home).folder)

    def is_well() -> bool:
        found = admin.stats(HEALTHY) if admin.is_ready() else {}
        return bool(found) and all(found.values())

    with running(command, log) as process:
        wait_until(is_well, "Envoy has found its server", START_LIMIT_S)
        (child,) = process.children()
        yield child


@contextmanager
def running(
    command: list[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[psutil.Process]:
    """A process that ends with the block."""
    with log.open("ab") as output:
        started = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            cwd=PROJECT_ROOT,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield psutil.Process(started.pid)
    finally:
        started.terminate()
        started.wait()


def request(model: str, signer: Signer, body: bytes, **claims: Any) -> bytes:
    """A request for a model, as it goes over the wire."""
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: localhost\r\n"
        f"authorization: Bearer {signer.token(f'infer:{model}', **claims)}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A TLS connection to a port of the loopback device; no certificate is checked."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return await asyncio.open_connection("127.0.0.1", port, ssl=context)


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """Read one answer; its head in lower case.

    Raises:
        RuntimeError: it is not a 200.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"expected 200, got {head[:200]!r}")
    head = head.lower()
    if b"transfer-encoding: chunked" in head:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            await reader.readexactly(size + 2)
        await reader.readexactly(2)
        return head
    length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    await reader.readexactly(int(length))
    return head
