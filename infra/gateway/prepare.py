"""Writes all that Envoy reads, and splits traffic; a running Envoy takes changes as they come."""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from infra.gateway.config import (
    GatewayFiles,
    GatewayPlan,
    Shares,
    read_plan,
    read_shares,
    write_shares,
)
from infra.gateway.envoy import Admin
from infra.gateway.rendering import SERVER_NAME, public_pair, rendered, sign_in_secret
from serving.security.certificates import Pair, ensure_authority, ensure_certificate
from serving.security.config import TlsConfig
from tasks.governance.identity import discovered
from tasks.kernel.errors import ConfigurationError, TransientError, refused_writes_explained
from tasks.kernel.files import locked, private_folder, write_atomically
from tasks.kernel.process import attempts

SHARES_LIMIT_S, PAUSE_S = 10.0, 0.02
INTERNAL, PUBLIC = "internal", "public-authority"


def prepare(plan: GatewayPlan) -> None:
    """Make certificates that are absent or old, and write the files that Envoy follows.

    Raises:
        ConfigurationError: a named certificate, key or key set cannot be read, or the issuer of
            sign-ins is another than the one that is named.
        TransientError: that issuer has never answered.
    """
    with prepared_folder(plan.files):
        _make_certificates(plan)
        _write_server_security(plan)
        _prepare_platform(plan)
        bootstrap = json.dumps(rendered("bootstrap", plan), indent=1) + "\n"
        write_atomically(plan.files.bootstrap, bootstrap)
        shares = read_shares(plan.files.shares_file)
        for kind in ("secrets", "clusters", "routes", "listeners"):
            write_resources(kind, plan, shares)


def write_resources(kind: str, plan: GatewayPlan, shares: Mapping[str, Shares]) -> str:
    """Replace a file that Envoy follows; returns its version, which is a digest of the rest."""
    return _write_versioned(plan.files.resource(kind), rendered(kind, plan, shares))


def _write_versioned(file: Path, found: object) -> str:
    version = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
    content = json.dumps({"version_info": version, "resources": found}, indent=1) + "\n"
    _replace(file, content)
    return version


@contextmanager
def prepared_folder(files: GatewayFiles) -> Iterator[None]:
    """Hold the lock of the edge's folder; only its owner can read what is written meanwhile."""
    with refused_writes_explained(files.folder):
        private_folder(files.folder)
        previous = os.umask(0o077)
        try:
            with locked(files.folder / ".lock"):
                yield
        finally:
            os.umask(previous)


def _replace(file: Path, content: str) -> None:
    """Envoy reads a file again when it is renamed; one that says the same is left alone."""
    if not file.exists() or file.read_text() != content:
        write_atomically(file, content)


def _make_certificates(plan: GatewayPlan) -> None:
    folder = plan.files.certificates
    internal = ensure_authority(folder, INTERNAL)
    ensure_certificate(folder, "server", internal, [SERVER_NAME, *_upstream_hosts(plan)], "server")
    ensure_certificate(folder, "edge-client", internal, ["falaj-edge"], "client")
    if plan.config.certificate is None:
        authority = ensure_authority(folder, PUBLIC)
        ensure_certificate(folder, "public", authority, plan.config.hosts, "server")
    pair = public_pair(plan)
    if not pair.exists:
        raise ConfigurationError(f"{pair.certificate} or {pair.key} does not exist")


def _upstream_hosts(plan: GatewayPlan) -> list[str]:
    addresses = (*plan.config.http, *plan.config.grpc, *plan.announced.get("http", ()))
    return sorted({address.rpartition(":")[0].strip("[]") for address in addresses})


def server_tls(files: GatewayFiles) -> TlsConfig:
    """TLS of a server that only this edge can talk to."""
    pair = Pair.at(files.certificates, "server")
    authority = Pair.at(files.certificates, INTERNAL)
    return TlsConfig(certificate=pair.certificate, key=pair.key, client_ca=authority.certificate)


def _write_server_security(plan: GatewayPlan) -> None:
    behind = (
        {"behind_edge": True, "tls": server_tls(plan.files).model_dump(mode="json")}
        if plan.config.upstream_tls
        else {"certificates": {}, "certificate_tenants": {}}
    )
    content = plan.security.model_dump(mode="json", exclude_defaults=True) | behind
    _replace(plan.files.server_security_file, yaml.safe_dump(content, sort_keys=False))


def _prepare_platform(plan: GatewayPlan) -> None:
    """Ask the issuer for its addresses; where it is away, those that it said last stay."""
    if plan.sign_in is None:
        return
    if not plan.files.session_key.exists():
        write_atomically(plan.files.session_key, secrets.token_urlsafe(32) + "\n", private=True)
    try:
        _replace(plan.files.issuer_file, json.dumps(discovered(plan.sign_in), indent=1) + "\n")
    except TransientError:
        if not plan.files.issuer_file.exists():
            raise
    if not plan.sign_in.client_secret.is_file():
        raise ConfigurationError(
            f"{plan.sign_in.client_secret} does not exist; expected the secret that the issuer "
            f"gave the client {plan.sign_in.client_id}, mode 600. Nothing was changed"
        )
    for name, file in (
        ("sign-in-client", plan.sign_in.client_secret),
        ("sign-in-session", plan.files.session_key),
    ):
        secret = sign_in_secret(name, file.read_text().strip())
        _write_versioned(plan.files.resource(name), [secret])


class GatewayTraffic:
    """The traffic of the gateway of one state folder.

    Args:
        home: the state folder.
        limit_s: how long a running Envoy may take to take new shares.
    """

    def __init__(self, home: Path, limit_s: float = SHARES_LIMIT_S) -> None:
        self._home = home
        self._limit_s = limit_s

    def shares(self, model: str) -> Shares:
        """How a model's traffic is split.

        Raises:
            ConfigurationError: the gateway lets no such model through.
        """
        plan = self._plan(model)
        return read_shares(plan.files.shares_file).get(model, Shares())

    def set_shares(self, model: str, candidate: float, mirror: float, sticky: bool = True) -> None:
        """Change how a model's traffic is split; returns when Envoy does so.

        The shares are kept in any case, and hold when Envoy starts again.

        Args:
            candidate: share of the candidate, 0 to 1.
            mirror: share that is sent to the shadow too, 0 to 1.
            sticky: a client always gets the same version.

        Raises:
            ConfigurationError: the gateway lets no such model through, or Envoy refused the routes.
            TransientError: Envoy does not run, or did not take them in time.
        """
        plan = self._plan(model)
        try:
            wanted = Shares(candidate=candidate, mirror=mirror, sticky=sticky)
        except ValueError as exc:
            raise ConfigurationError(
                f"shares are between 0 and 1; got candidate={candidate!r}, mirror={mirror!r}"
            ) from exc
        with prepared_folder(plan.files):
            known = dict(read_shares(plan.files.shares_file))
            write_shares(plan.files.shares_file, known | {model: wanted})
            version = write_resources("routes", plan, known | {model: wanted})
            self._wait(Admin(plan.files.folder), version)

    def _plan(self, model: str) -> GatewayPlan:
        plan = read_plan(self._home)
        if model not in plan.config.models:
            raise ConfigurationError(
                f"the gateway lets no model {model} through; it knows "
                f"{', '.join(sorted(plan.config.models))}. Add it to models in "
                f"{plan.files.config_file} and run `falaj gateway prepare`"
            )
        return plan

    def _wait(self, admin: Admin, version: str) -> None:
        for _ in attempts(self._limit_s, PAUSE_S):
            try:
                found, refused = admin.version_of_routes()
            except TransientError as exc:
                raise TransientError(f"{exc}. The shares are kept until it starts") from exc
            if found == version:
                return
        if refused:
            raise ConfigurationError(f"Envoy refused the new shares: {refused}")
        raise TransientError(
            f"Envoy has not taken the new shares within {self._limit_s:g} s; they are kept, and "
            "hold when it does or starts again"
        )
