"""Envoy before a server of a bench, and requests with a token."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jwt
import psutil
import yaml
from cryptography.hazmat.primitives.asymmetric import ec

from infra.bench.serving.processes import running
from infra.gateway.config import GatewayFiles, read_plan
from infra.gateway.envoy import Admin
from infra.gateway.prepare import prepare

AUDIENCE, ISSUER = "falaj", "https://issuer.test"
PLENTY = {"per_s": 1e6, "burst": 1_000_000}
HEALTHY = r"cluster\.http-(stable|candidate)\.membership_healthy"


@dataclass
class Signer:
    """An issuer that signs tokens with ES256; its public keys are those in `published`."""

    issuer: str = ISSUER
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
    issuer = {"issuer": signer.issuer, "audience": AUDIENCE, "keys": "keys.json"}
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
    admin = Admin(GatewayFiles(home).folder)

    def is_well() -> bool:
        found = admin.stats(HEALTHY) if admin.is_ready() else {}
        return bool(found) and all(found.values())

    command = [sys.executable, "-m", "falaj", "--home", str(home), "gateway", "run"]
    with running(command, log, is_well) as guard:
        (found,) = [one for one in guard.children(recursive=True) if "envoy" in one.name()]
        yield found


def request(model: str, body: bytes, signer: Signer | None = None, **claims: Any) -> bytes:
    """A request for a model, as it goes over the wire with the headers of usual clients."""
    token = signer.token(f"infer:{model}", **claims) if signer else ""
    lines = [
        f"POST /v2/models/{model}/infer HTTP/1.1",
        "host: localhost",
        "user-agent: falaj-bench",
        "accept: */*",
        *([f"authorization: Bearer {token}"] if token else []),
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
