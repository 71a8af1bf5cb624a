"""Writes all that Envoy reads; a running Envoy takes what has changed, without a restart."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from infra.gateway.clusters import SERVER_NAME, clusters
from infra.gateway.config import EdgePlan
from infra.gateway.listeners import listener, public_pair, secrets
from infra.gateway.place import ADMIN_SOCKET, EdgePlace
from infra.gateway.routes import route_configuration
from infra.gateway.shares import Shares, read_shares
from infra.gateway.values import Value, follow, resources, typed
from serving.security.certificates import Pair, ensure_authority, ensure_certificate
from serving.security.config import TlsConfig
from tasks.kernel.errors import ConfigurationError, refused_writes_explained
from tasks.kernel.files import private_folder, write_atomically

RUNTIME = {"tracing.opentelemetry.flush_interval_ms": 1000}
INTERNAL, PUBLIC = "internal", "public-authority"


def prepare(plan: EdgePlan) -> None:
    """Make certificates that are absent or old, and write the files that Envoy follows.

    Raises:
        ConfigurationError: a named certificate, key or key set cannot be read.
    """
    with prepared_folder(plan.place):
        _make_certificates(plan)
        _write_server_security(plan)
        write_atomically(plan.place.bootstrap, json.dumps(_bootstrap(plan), indent=1) + "\n")
        _replace(plan.place.resource("secrets"), resources(secrets(plan)))
        _replace(plan.place.resource("clusters"), resources(clusters(plan)))
        write_routes(plan, read_shares(plan.place.shares_file))
        _replace(plan.place.resource("listeners"), resources(_listeners(plan)))


def write_routes(plan: EdgePlan, shares: Mapping[str, Shares]) -> str:
    """Replace the routes; returns the whole file."""
    content = resources([route_configuration(plan, shares)])
    _replace(plan.place.resource("routes"), content)
    return content


@contextmanager
def prepared_folder(place: EdgePlace) -> Iterator[None]:
    """Hold the lock of the edge's folder; only its owner can read what is written meanwhile."""
    with refused_writes_explained(place.folder):
        private_folder(place.folder)
        previous = os.umask(0o077)
        try:
            with (place.folder / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        finally:
            os.umask(previous)


def _listeners(plan: EdgePlan) -> list[Value]:
    try:
        return [listener(plan)]
    except OSError as exc:
        raise ConfigurationError(f"keys {exc.filename} cannot be read: {exc.strerror}") from exc


def _replace(file: Path, content: str) -> None:
    """Envoy reads a file again when it is renamed; one that says the same is left alone."""
    if not file.exists() or file.read_text() != content:
        write_atomically(file, content)


def _make_certificates(plan: EdgePlan) -> None:
    folder = plan.place.certificates
    internal = ensure_authority(folder, INTERNAL)
    ensure_certificate(folder, "server", internal, [SERVER_NAME, *_upstream_hosts(plan)], "server")
    ensure_certificate(folder, "edge-client", internal, ["falaj-edge"], "client")
    if plan.config.certificate is None:
        authority = ensure_authority(folder, PUBLIC)
        ensure_certificate(folder, "public", authority, plan.config.hosts, "server")
    pair = public_pair(plan)
    if not pair.exists:
        raise ConfigurationError(f"{pair.certificate} or {pair.key} does not exist")


def _upstream_hosts(plan: EdgePlan) -> list[str]:
    addresses = (*plan.config.http, *plan.config.grpc)
    return sorted({address.rpartition(":")[0].strip("[]") for address in addresses})


def server_tls(place: EdgePlace) -> TlsConfig:
    """TLS of a server that only this edge can talk to."""
    pair = Pair.at(place.certificates, "server")
    authority = Pair.at(place.certificates, INTERNAL)
    return TlsConfig(certificate=pair.certificate, key=pair.key, client_ca=authority.certificate)


def _write_server_security(plan: EdgePlan) -> None:
    behind = (
        {"behind_edge": True, "tls": server_tls(plan.place).model_dump(mode="json")}
        if plan.config.upstream_tls
        else {"certificates": {}, "certificate_tenants": {}}
    )
    content = plan.security.model_dump(mode="json", exclude_defaults=True) | behind
    _replace(plan.place.server_security_file, yaml.safe_dump(content, sort_keys=False))


def _bootstrap(plan: EdgePlan) -> Value:
    connections = typed(
        "envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        max_active_downstream_connections=plan.config.max_connections,
    )
    monitor = "envoy.resource_monitors.global_downstream_max_connections"
    return {
        "node": {"id": "falaj-edge", "cluster": "falaj"},
        "admin": {"address": {"pipe": {"path": ADMIN_SOCKET, "mode": 0o600}}},
        "dynamic_resources": {
            "lds_config": follow(plan.place.resource("listeners")),
            "cds_config": follow(plan.place.resource("clusters")),
        },
        "layered_runtime": {"layers": [{"name": "edge", "static_layer": RUNTIME}]},
        "overload_manager": {"resource_monitors": [{"name": monitor, "typed_config": connections}]},
    }
