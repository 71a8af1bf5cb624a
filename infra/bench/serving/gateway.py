"""Servers in the benches and what stands before them: Envoy, and requests with a token."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jwt
import psutil
import yaml
from cryptography.hazmat.primitives.asymmetric import ec

from infra.gateway.config import GatewayFiles, read_plan
from infra.gateway.envoy import Admin
from infra.gateway.prepare import prepare
from tasks.kernel.settings import PROJECT_ROOT

AUDIENCE, ISSUER = "falaj", "https://issuer.test"
PLENTY = {"per_s": 1e6, "burst": 1_000_000}
START_LIMIT_S = 180
HEALTHY = r"cluster\.http-(stable|candidate)\.membership_healthy"


@dataclass
class Signer:
    """An issuer that signs tokens with ES256; its public keys are those in `published`."""

    issuer: str
    kid: str = "one"
    key: Any = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    published: dict[str, Any] = field(default_factory=dict)
    asked: int = 0

    def __post_init__(self) -> None:
        self.published.setdefault(self.kid, self.key)

    def rotate(self, kid: str) -> None:
        """Sign with a new key; the old ones are not published any more."""
        self.kid, self.key = kid, ec.generate_private_key(ec.SECP256R1())
        self.published = {kid: self.key}

    def keys(self) -> str:
        """The published keys as a JWKS."""
        entries = [
            json.loads(jwt.algorithms.ECAlgorithm.to_jwk(key.public_key()))
            | {"kid": kid, "alg": "ES256", "use": "sig"}
            for kid, key in self.published.items()
        ]
        return json.dumps({"keys": entries})

    def token(
        self,
        *roles: str,
        key: Any = None,
        alg: str = "ES256",
        kid: str | None = None,
        **claims: Any,
    ) -> str:
        """A token; claims that are None are left out."""
        now = int(time.time())
        usual = {"iss": self.issuer, "aud": AUDIENCE, "sub": "somebody", "iat": now}
        content = usual | {"exp": now + 600, "roles": list(roles)} | claims
        content = {name: value for name, value in content.items() if value is not None}
        signing = self.key if key is None else key
        return jwt.encode(content, signing, algorithm=alg, headers={"kid": kid or self.kid})


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

    def is_well(_: psutil.Process) -> bool:
        found = admin.stats(HEALTHY) if admin.is_ready() else {}
        return bool(found) and all(found.values())

    with running(command, log, is_well) as process:
        (child,) = process.children()
        yield child


@contextmanager
def running(
    command: list[str],
    log: Path,
    is_ready: Callable[[psutil.Process], bool],
    environment: Mapping[str, str] | None = None,
    folder: Path = PROJECT_ROOT,
) -> Iterator[psutil.Process]:
    """A process, once it is ready; it and all that it has started end with the block.

    Raises:
        RuntimeError: it ended before, or took too long; with what it wrote last.
    """
    environment = {**os.environ, **(environment or {})}
    with log.open("ab") as output:
        started = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
    try:
        process, deadline = psutil.Process(started.pid), time.monotonic() + START_LIMIT_S
        while not is_ready(process):
            if started.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command} did not start: {log.read_text()[-3000:]}")
            time.sleep(0.05)
        yield process
    finally:
        for how in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(started.pid, how)
            with suppress(subprocess.TimeoutExpired):
                started.wait(20)


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
