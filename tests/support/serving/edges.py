"""A real Envoy before a small v2 server, with issuers and clients, for tests."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import yaml

from infra.bench.serving.installation import PLENTY, write_settings
from infra.gateway.config import GatewayPlan, read_plan
from infra.gateway.envoy import Admin
from infra.gateway.prepare import GatewayTraffic, prepare
from infra.orchestration.embedded import free_port
from serving.security.certificates import Pair, ensure_authority, ensure_certificate
from serving.security.config import Rate, read_security
from serving.security.keys import create_key
from tests.support.host.processes import wait_until
from tests.support.services.listeners import Answer, Asked, http_listener, https_client
from tests.support.services.signing import AUDIENCE, Signer, published
from tests.support.serving.upstream import Upstream

MODEL, OTHERS = "flight-delay", "acme-churn"
API_KEYS = "api-keys.json"
BODY_LIMIT = 64 * 1024
INFER = f"/v2/models/{MODEL}/infer"
START_LIMIT_S = 120


@dataclass
class Edge:
    """What a test talks to."""

    home: Path
    port: int
    upstream: Upstream
    signer: Signer
    tenants: Signer
    client_certificate: Pair
    collected: list[bytes]
    traffic: GatewayTraffic
    log: Path
    process: subprocess.Popen[bytes] | None = None
    clients: list[httpx.Client] = field(default_factory=list)

    @property
    def plan(self) -> GatewayPlan:
        return read_plan(self.home)

    @property
    def admin(self) -> Admin:
        return Admin(self.plan.files.folder)

    @property
    def api_keys(self) -> Path:
        return self.home / "serving" / API_KEYS

    @property
    def authority(self) -> Path:
        return self.plan.files.certificates / "public-authority.pem"

    def client(self, certificate: Pair | None = None, **options: Any) -> httpx.Client:
        url = f"https://localhost:{self.port}"
        made = https_client(url, self.authority, certificate, **options)
        self.clients.append(made)
        return made

    def bearer(self, subject: str = "somebody", *roles: str, **claims: Any) -> dict[str, str]:
        roles = roles or (f"infer:{MODEL}", "read:*")
        return {"authorization": f"Bearer {self.signer.token(*roles, sub=subject, **claims)}"}

    def key(self, subject: str, *grants: str) -> tuple[str, str]:
        """A new API key and its id."""
        text, made = create_key(self.api_keys, subject, grants or (f"infer:{MODEL}",))
        return text, made.id

    def start(self) -> None:
        command = [sys.executable, "-m", "falaj", "--home", str(self.home), "gateway", "run"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._is_up, "Envoy is up", START_LIMIT_S)

    def stop(self, kill: bool = False) -> None:
        if self.process is not None:
            (self.process.kill if kill else self.process.terminate)()
            self.process.wait(60)
            self.process = None

    def is_healthy(self) -> bool:
        found = self.admin.stats(r"cluster\.http-stable\.membership_healthy")
        return bool(found) and all(found.values())

    def _is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        return self.admin.is_ready() and self.is_healthy()


@contextmanager
def running_edge(folder: Path, **settings: Any) -> Iterator[Edge]:
    """Start all; `settings` go into edge.yaml."""
    home = folder / "home"
    signer, tenants = Signer("https://issuer.test"), Signer("https://tenants.test")
    with ExitStack() as stack:
        keys_url = stack.enter_context(published(signer))
        collected: list[bytes] = []

        def collect(asked: Asked) -> Answer:
            collected.append(asked.body)
            return 200, "text/plain", b""

        collector = stack.enter_context(http_listener(collect)) + "/v1/traces"
        authority = ensure_authority(folder / "clients", "clients")
        pair = ensure_certificate(folder / "clients", "batch", authority, ["batch"], "client")
        ports = {name: free_port() for name in ("edge", "http", "grpc")}
        write_settings(home, signer, ports, MODEL)
        tenant_keys = home / "serving" / "tenants.json"
        tenant_keys.write_text(tenants.keys())
        audience = {"audience": AUDIENCE}
        security = {
            "issuers": [
                {"issuer": signer.issuer, "keys": keys_url, "refresh_s": 1, **audience},
                {
                    "issuer": tenants.issuer,
                    "keys": str(tenant_keys),
                    "tenant_claim": "tenant",
                    **audience,
                },
            ],
            "api_keys": str(home / "serving" / API_KEYS),
            "certificates": {"CN=batch": [f"infer:{MODEL}"]},
            "grants": {"analyst": [f"infer:{MODEL}", "read:*"]},
            "owners": {OTHERS: "acme"},
            "max_body_bytes": BODY_LIMIT,
            "limits": {"client": PLENTY},
        }
        experiment = {"header": "x-try", "value": "new", "track": "candidate"}
        edge_file = home / "edge" / "edge.yaml"
        edge = yaml.safe_load(edge_file.read_text()) | {
            "models": {MODEL: {"experiments": [experiment]}, OTHERS: {}},
            "client_ca": str(authority.certificate),
            "limit": {"per_s": 0.1, "burst": 60},
            "traces": collector,
        }
        edge_file.write_text(yaml.safe_dump(edge | settings))
        (home / "serving" / "security.yaml").write_text(yaml.safe_dump(security))
        plan = read_plan(home)
        prepare(plan)
        often = Rate(**PLENTY)  # tests look until a key is taken
        stack.enter_context(patch("serving.security.guard.FAILURES", often))
        upstream = Upstream(
            ports["http"], ports["grpc"], read_security(plan.files.server_security_file)
        )
        upstream.start()
        stack.callback(upstream.stop)
        found = Edge(
            home,
            ports["edge"],
            upstream,
            signer,
            tenants,
            pair,
            collected,
            GatewayTraffic(home, limit_s=60),
            folder / "envoy.log",
        )
        stack.callback(lambda: [client.close() for client in found.clients])
        stack.callback(found.stop)
        found.start()
        yield found
