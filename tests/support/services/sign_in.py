"""One sign-in for tests: Envoy, the authorizer, Prefect, MLflow, serving; an issuer of tokens."""

import base64
import hashlib
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import httpx
import yaml

from infra.bench.serving.installation import PLENTY, Signer
from infra.gateway.config import AUTHORIZER_SOCKET, GatewayFiles
from infra.gateway.envoy import Admin
from infra.orchestration.client import read_password
from infra.orchestration.embedded import free_port
from infra.platform.api import answers, basic_auth
from infra.platform.config import MLFLOW_SECRET, PlatformConfig
from infra.platform.files import PlatformFiles, ensure_password
from infra.platform.services import Plan, mlflow_service, prefect_service
from serving.security.certificates import ensure_authority
from tasks.contracts.serving import live_addresses
from tasks.kernel.tenants import Tenant, put_tenant
from tests.support.host.processes import python, wait_until
from tests.support.services.listeners import Answer, Asked, http_listener, https_client, json_answer
from tests.support.services.signing import issued
from tests.support.state import acts

CLIENT, SECRET = "falaj", "a-secret-of-the-client"
START_LIMIT_S = 180


@dataclass
class Provider(Signer):
    """A small OpenID provider over HTTP: discovery, keys, code flow with PKCE for one person."""

    person: dict[str, Any] = field(default_factory=dict)
    codes: dict[str, dict[str, str]] = field(default_factory=dict)

    def token(self, *roles: str, **claims: Any) -> str:
        usual = {"aud": CLIENT, "iat": int(time.time()), "tenant": "falaj", "use_cases": ["*"]}
        return super().token(*roles, **(usual | claims))

    def answer(self, asked: Asked) -> Answer:
        path, _, query = asked.path.partition("?")
        if path == "/authorization_endpoint":
            begun = dict(parse_qsl(query))
            assert (begun["client_id"], begun["response_type"]) == (CLIENT, "code")
            self.codes[code := os.urandom(8).hex()] = begun
            back = urlencode({"code": code, "state": begun["state"]})
            return 302, "text/plain", f"{begun['redirect_uri']}?{back}".encode()
        if path != "/token_endpoint":
            return issued(self, asked)
        sent = dict(parse_qsl(asked.body.decode()))
        begun = self.codes.pop(sent["code"])
        digest = hashlib.sha256(sent["code_verifier"].encode()).digest()
        assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == begun["code_challenge"]
        if asked.headers["authorization"] != basic_auth(f"{CLIENT}:{SECRET}")["Authorization"]:
            return json_answer({"error": "invalid_client"}, 401)
        found = {"access_token": "opaque", "token_type": "Bearer", "expires_in": 600}
        return json_answer(found | {"id_token": self.token(**self.person)})


@contextmanager
def provider() -> Iterator[Provider]:
    made = Provider()
    with http_listener(made.answer) as made.issuer:
        yield made


@dataclass
class Gate:
    """A platform behind its authorizer.

    Attributes:
        address: of the listener `platform`.
        direct: addresses of the servers behind it.
        passed: paths that came through to the feature server's stand-in.
    """

    home: Path
    address: str
    issuer: Provider
    direct: dict[str, str]
    passed: list[Asked] = field(default_factory=list)
    programs: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return GatewayFiles(self.home).folder

    def client(self, certificate: Any = None, **options: Any) -> httpx.Client:
        authority = self.folder / "certificates" / "public-authority.pem"
        return https_client(self.address, authority, certificate, **options)

    def bearer(self, *roles: str, **claims: Any) -> dict[str, str]:
        return {"authorization": f"Bearer {self.issuer.token(*roles, **claims)}"}

    def start(self, name: str) -> None:
        """`run` (Envoy) or `authorizer`."""
        line = ["-m", "falaj", "--home", str(self.home), "gateway", name]
        with (self.home.parent / f"{name}.log").open("a") as log:
            self.programs[name] = python(*line, stdout=log, stderr=log)
        admin = Admin(self.folder, *([AUTHORIZER_SOCKET] if name == "authorizer" else []))
        wait_until(admin.is_ready, f"gateway {name} is up", START_LIMIT_S)

    def stop(self, name: str) -> None:
        ended(self.programs.pop(name))

    def journal(self, action: str) -> list[dict[str, Any]]:
        return acts(self.home, action)


def write_sign_in(home: Path, at: str, /, **settings: Any) -> None:
    (home / "client-secret").write_text(f"{SECRET}\n")
    described = {"issuer": at, "client_id": CLIENT, "client_secret": "client-secret"}
    (home / "sign-in.yaml").write_text(yaml.safe_dump({**described, **settings}))


@contextmanager
def running_gate(
    folder: Path, *, servers: bool = True, of: tuple[str, Provider] | None = None, **settings: Any
) -> Iterator[Gate]:
    """Start all; `settings` go into sign-in.yaml.

    Args:
        of: tenant and issuer, where the folder has an installation with several gates.

    Real are Envoy, the authorizer, Prefect's and MLflow's servers and the serving process (unless
    `servers` is False); the feature server is a stand-in that answers all.
    """
    (above := folder / "home").mkdir(parents=True, exist_ok=of is not None)
    home = put_tenant(above, of[0], Tenant()) if of else above
    with ExitStack() as stack:
        issuer = of[1] if of else stack.enter_context(provider())
        write_sign_in(above, issuer.issuer, **settings)
        passed: list[Asked] = []

        def answer(asked: Asked) -> Answer:
            passed.append(asked)
            return json_answer({"path": asked.path, "headers": dict(asked.headers)})

        ports = {name: free_port() for name in ("edge", "platform", "prefect", "mlflow", "serving")}
        stand_in = stack.enter_context(http_listener(answer))
        direct = {n: f"http://127.0.0.1:{ports[n]}" for n in ("prefect", "mlflow")}
        if not servers:
            direct = dict.fromkeys(direct, stand_in)
        authority = ensure_authority(folder / "clients", "clients")
        behind = {name: url.removeprefix("http://") for name, url in direct.items()}
        at = stand_in.removeprefix("http://")
        edge = {
            "models": {"model": {}},
            "listen": f"127.0.0.1:{ports['edge']}",
            "client_ca": str(authority.certificate),
            "address_limit": PLENTY,
            "workers": 1,
            "platform": {
                "listen": f"127.0.0.1:{ports['platform']}",
                "features": dict.fromkeys(("flights", "churn"), at),
                **behind,
            },
        }
        (home / "edge").mkdir()
        (home / "edge" / "edge.yaml").write_text(yaml.safe_dump(edge))
        files = PlatformFiles(home)
        for name in ("secret", MLFLOW_SECRET):
            ensure_password(files, name)
        for use_case in ("reports", "use_cases/churn/reports"):
            page = home / use_case / "one" / "index.html"
            page.parent.mkdir(parents=True)
            page.write_text("a report")
        gate = Gate(home, f"https://localhost:{ports['platform']}", issuer, direct, passed)
        if servers:
            plan = Plan(files, PlatformConfig(), ports, read_password(files.folder), os.environ, ())
            plan = replace(plan, has_authorizer=True)
            for service in (prefect_service(plan), mlflow_service(plan)):
                service.before_start()
                log = stack.enter_context((folder / f"{service.name}.log").open("w"))
                words = service.command[1:]
                run = python(*words, env=dict(service.environment), stdout=log, stderr=log)
                stack.callback(ended, run)
            words = ("--http-port", "0", "--grpc-port", "0", "--admin-port", "0")
            log = stack.enter_context((folder / "serving.log").open("w"))
            own = {**os.environ, "FALAJ_HOME": str(home)}
            run = python("-m", "serving", *words, env=own, stdout=log, stderr=log)
            stack.callback(ended, run)
            wait_until(lambda: bool(live_addresses(home)), "serving is up", START_LIMIT_S)
            direct["serving"] = str(live_addresses(home)[0]["admin"])
            for name, path in (("prefect", "/api/health"), ("mlflow", "/health")):
                wait_until(partial(answers, direct[name] + path), f"{name} is up", START_LIMIT_S)
        stack.callback(lambda: [gate.stop(name) for name in list(gate.programs)])
        gate.start("authorizer")
        gate.start("run")
        yield gate


def ended(program: subprocess.Popen[str]) -> None:
    program.terminate()
    program.wait(60)
