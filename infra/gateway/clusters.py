"""The servers behind the edge: one cluster for each protocol and slot, issuers, trace collector.

The slots of one server are clusters of their own, so that each has its own counters and bounds.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from infra.gateway.config import EdgePlan, host_and_port
from infra.gateway.values import TLS, TYPES, Value, exact, seconds, socket_address, typed
from serving.calls import SLOTS
from serving.security.certificates import Pair
from serving.security.config import IssuerConfig

CLUSTER = "envoy.config.cluster.v3.Cluster"
PROTOCOL_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
SERVER_NAME = "falaj-server"
"""In the server's certificate; the edge talks to nobody else."""
IDLE_S = 30
"""Shorter than the server keeps a connection, so that the edge is the one to close it."""
HEALTH_PATH = "/v2/health/ready"
MAX_REQUESTS = 4096
SYSTEM_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"


def clusters(plan: EdgePlan) -> list[Value]:
    """All clusters."""
    found = [_upstream(plan, protocol, slot) for protocol in ("http", "grpc") for slot in SLOTS]
    found += [
        _issuer(index, issuer)
        for index, issuer in enumerate(plan.security.issuers)
        if issuer.is_remote
    ]
    if plan.config.traces:
        found.append(_collector(plan.config.traces))
    return found


def issuer_cluster(index: int) -> str:
    """Name of the cluster of an issuer's keys."""
    return f"issuer-{index}"


def _upstream(plan: EdgePlan, protocol: str, slot: str) -> Value:
    config = plan.config
    most = config.max_shadow_requests if slot == "shadow" else MAX_REQUESTS
    limits = {
        "max_connections": most,
        "max_pending_requests": most,
        "max_requests": most,
        "max_retries": 16,
    }
    cluster = _cluster(f"{protocol}-{slot}", config.http if protocol == "http" else config.grpc)
    cluster |= {
        "typed_extension_protocol_options": _protocol_options(protocol),
        "circuit_breakers": {"thresholds": [limits]},
        "outlier_detection": {
            "consecutive_gateway_failure": 5,
            "enforcing_consecutive_gateway_failure": 100,
            "enforcing_consecutive_5xx": 0,  # an answer of the model is no fault of the host
            "base_ejection_time": "5s",
            "max_ejection_percent": 50,
        },
    }
    if protocol == "http" and slot != "shadow":
        cluster["health_checks"] = [_health_check()]
    return cluster | (_mutual_tls(plan, protocol) if config.upstream_tls else {})


def _protocol_options(protocol: str) -> Value:
    explicit: Value = (
        {"http_protocol_options": {}}
        if protocol == "http"
        else {
            "http2_protocol_options": {"connection_keepalive": {"interval": "30s", "timeout": "5s"}}
        }
    )
    options = typed(
        PROTOCOL_OPTIONS,
        common_http_protocol_options={"idle_timeout": seconds(IDLE_S)},
        explicit_http_config=explicit,
    )
    return {PROTOCOL_OPTIONS: options}


def _health_check() -> Value:
    return {
        "timeout": "2s",
        "interval": "2s",
        "no_traffic_interval": "2s",
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "http_health_check": {"path": HEALTH_PATH},
    }


def _mutual_tls(plan: EdgePlan, protocol: str) -> Value:
    folder = plan.place.certificates
    ours = Pair.at(folder, "edge-client")
    names = [{"san_type": "DNS", "matcher": exact(SERVER_NAME)}]
    context = {
        "tls_params": _only_tls13(),
        "tls_certificates": [
            {
                "certificate_chain": {"filename": str(ours.certificate)},
                "private_key": {"filename": str(ours.key)},
            }
        ],
        "validation_context": {
            "trusted_ca": {"filename": str(Pair.at(folder, "internal").certificate)},
            "match_typed_subject_alt_names": names,
        },
        "alpn_protocols": ["http/1.1" if protocol == "http" else "h2"],
    }
    return _tls(context, SERVER_NAME)


def _issuer(index: int, issuer: IssuerConfig) -> Value:
    parts = urlsplit(str(issuer.keys))
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = parts.hostname or ""
    cluster = _cluster(issuer_cluster(index), (f"{host}:{port}",))
    if parts.scheme != "https":
        return cluster
    authorities = {"filename": str(issuer.ca_file or SYSTEM_AUTHORITIES)}
    names = [{"san_type": "DNS", "matcher": exact(host)}]
    context = {
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "validation_context": {"trusted_ca": authorities, "match_typed_subject_alt_names": names},
    }
    return cluster | _tls(context, host)


def _collector(url: str) -> Value:
    parts = urlsplit(url)
    return _cluster("traces", (f"{parts.hostname}:{parts.port}",))


def _cluster(name: str, addresses: Sequence[str]) -> Value:
    hosts = [host_and_port(address) for address in addresses]
    endpoints = [{"endpoint": {"address": socket_address(host, port)}} for host, port in hosts]
    kind = "STATIC" if all(_is_ip(host) for host, _ in hosts) else "STRICT_DNS"
    return {
        "@type": TYPES + CLUSTER,
        "name": name,
        "type": kind,
        "connect_timeout": "2s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
    }


def _tls(context: Value, name: str) -> Value:
    return {
        "transport_socket": {
            "name": "envoy.transport_sockets.tls",
            "typed_config": typed(TLS + "UpstreamTlsContext", common_tls_context=context, sni=name),
        }
    }


def _only_tls13() -> Value:
    return {"tls_minimum_protocol_version": "TLSv1_3", "tls_maximum_protocol_version": "TLSv1_3"}


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
