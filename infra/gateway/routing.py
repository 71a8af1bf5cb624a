"""Where requests go: the servers behind the gateway, and which of them answers what.

Only what is listed here is let through, by model, deployment track and share. The tracks of one
server are clusters of their own, so that each has its own counters and bounds.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from infra.gateway.config import (
    PARTS,
    GatewayConfig,
    GatewayPlan,
    ModelConfig,
    Shares,
    host_and_port,
)
from serving.interfaces import GRPC_MODEL_HEADER, TRACK_HEADER, TRACKS
from serving.security.certificates import Pair
from serving.security.config import KEY_HEADER, IssuerConfig
from serving.security.guard import SECURITY_HEADERS

Value = dict[str, Any]
TYPES = "type.googleapis.com/"
FILTERS = "envoy.extensions.filters.http."
TLS = "envoy.extensions.transport_sockets.tls.v3."
SUBJECT_HEADER = "x-falaj-subject"
ADDRESS_HEADER = "x-falaj-address"
CERTIFICATE_HEADER = "x-forwarded-client-cert"
CLUSTER = "envoy.config.cluster.v3.Cluster"
PROTOCOL_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
SERVER_NAME = "falaj-server"
"""In the server's certificate; the gateway talks to nobody else."""
MAX_REQUESTS = 4096
SYSTEM_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
ROUTES = "falaj"
GRPC_SERVICE = "/inference.GRPCInferenceService/"
GRPC_HEALTH = "/grpc.health.v1.Health/Check"
GRPC_METHODS = ("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata")
VERSION = r"(/versions/[^/]+)?"
RETRY_SAFE = "connect-failure,refused-stream,reset-before-request"
"""The server has seen nothing of the request, so it cannot be computed twice."""


@functools.cache
def _fragments() -> Value:
    return dict(yaml.safe_load(Path(__file__).with_name("envoy.yaml").read_text()))


def fragment(name: str) -> Value:
    """A constant part of Envoy's configuration, from `envoy.yaml`; the caller may change it."""
    return copy.deepcopy(_fragments()[name])


def typed(kind: str, **fields: Any) -> Value:
    """A message with its type."""
    return {"@type": TYPES + kind, **fields}


def seconds(value: float) -> str:
    """A duration."""
    return f"{value:g}s" if value >= 0.001 else f"{value:.9f}s"


def exact(text: str) -> Value:
    """Matches this text alone."""
    return {"exact": text}


def header(name: str, text: str) -> Value:
    """Matches requests whose header is this text."""
    return {"name": name, "string_match": exact(text)}


def read_method() -> Value:
    """Matches requests that only read."""
    return {"name": ":method", "string_match": {"safe_regex": {"regex": "GET|HEAD"}}}


def has_header(name: str) -> Value:
    """Matches requests that have this header."""
    return {"name": name, "present_match": True}


def set_header(name: str, text: str) -> Value:
    """Gives a header this one value, whatever it had."""
    return {
        "header": {"key": name, "value": text},
        "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
    }


def security_headers() -> list[Value]:
    """Headers of every answer, those of the server with the same names replaced."""
    return [set_header(name.decode(), value.decode()) for name, value in SECURITY_HEADERS]


def socket_address(host: str, port: int) -> Value:
    """An address and port."""
    return {"socket_address": {"address": host, "port_value": port}}


def follow(file: Path) -> Value:
    """Configuration that is read from a file, and again when it is replaced."""
    return {"path_config_source": {"path": str(file)}, "resource_api_version": "V3"}


def resources(found: Sequence[Value]) -> str:
    """The content of a file that Envoy follows; its version is a digest of the rest."""
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
    return json.dumps({"version_info": digest, "resources": found}, indent=1) + "\n"


def clusters(plan: GatewayPlan) -> list[Value]:
    """All clusters."""
    found = [_upstream(plan, protocol, track) for protocol in ("http", "grpc") for track in TRACKS]
    found += [
        _issuer(index, issuer)
        for index, issuer in enumerate(plan.security.issuers)
        if issuer.is_remote
    ]
    if plan.config.traces:
        traces = urlsplit(plan.config.traces)
        found.append(_cluster("traces", (f"{traces.hostname}:{traces.port}",)))
    return found


def issuer_cluster(index: int) -> str:
    """Name of the cluster of an issuer's keys."""
    return f"issuer-{index}"


def _upstream(plan: GatewayPlan, protocol: str, track: str) -> Value:
    config = plan.config
    most = config.max_shadow_requests if track == "shadow" else MAX_REQUESTS
    bounded = ("max_connections", "max_pending_requests", "max_requests")
    limits = dict.fromkeys(bounded, most) | {"max_retries": 16}
    cluster = _cluster(f"{protocol}-{track}", config.http if protocol == "http" else config.grpc)
    options = typed(PROTOCOL_OPTIONS, **fragment(f"{protocol}_options"))
    cluster |= fragment("server") | {
        "typed_extension_protocol_options": {PROTOCOL_OPTIONS: options},
        "circuit_breakers": {"thresholds": [limits]},
    }
    if protocol == "http" and track != "shadow":
        cluster["health_checks"] = fragment("health_checks")
    return cluster | (_mutual_tls(plan, protocol) if config.upstream_tls else {})


def _mutual_tls(plan: GatewayPlan, protocol: str) -> Value:
    folder = plan.files.certificates
    ours = Pair.at(folder, "edge-client")
    names = [{"san_type": "DNS", "matcher": exact(SERVER_NAME)}]
    context = {
        "tls_params": fragment("tls_1_3"),
        "tls_certificates": [certificate_files(ours)],
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


def certificate_files(pair: Pair) -> Value:
    """A certificate and its key, read from files."""
    return {
        "certificate_chain": {"filename": str(pair.certificate)},
        "private_key": {"filename": str(pair.key)},
    }


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def route_configuration(plan: GatewayPlan, shares: Mapping[str, Shares]) -> Value:
    """All routes; what none of them matches does not exist for clients."""
    config = plan.config
    routes = [_plain(r"/v2/health/(live|ready)|/v2/?", config)]
    for name, model in config.models.items():
        routes += _model_routes(name, model, shares.get(name, Shares()), config)
    methods = [GRPC_SERVICE + method for method in (*GRPC_METHODS, "ModelInfer")]
    routes += [_grpc_route(path, config) for path in (*methods, GRPC_HEALTH)]
    return typed(
        "envoy.config.route.v3.RouteConfiguration",
        name=ROUTES,
        virtual_hosts=[
            {"name": "all", "domains": ["*"], "routes": [*routes, fragment("no_route")]}
        ],
        request_headers_to_add=[
            set_header(ADDRESS_HEADER, "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%")
        ],
        response_headers_to_add=security_headers(),
        response_headers_to_remove=["x-powered-by"],
    )


def infer_path(model: str) -> str:
    """Regular expression of the paths on which a model answers."""
    return rf"/v2/models/{re.escape(model)}{VERSION}/infer"


def read_path(model: str) -> str:
    """Regular expression of the paths that describe a model."""
    return rf"/v2/models/{re.escape(model)}{VERSION}(/ready)?"


def _model_routes(
    name: str, model: ModelConfig, shares: Shares, config: GatewayConfig
) -> list[Value]:
    http: Value = {
        "safe_regex": {"regex": infer_path(name)},
        "headers": [header(":method", "POST")],
    }
    grpc: Value = {
        "path": GRPC_SERVICE + "ModelInfer",
        "headers": [header(GRPC_MODEL_HEADER, name)],
    }
    found = []
    for protocol, match in (("http", http), ("grpc", grpc)):
        for test in model.experiments:
            special = header(test.header, test.value)
            action = {"cluster": f"{protocol}-{test.track}"} | _mirror(protocol, shares)
            found.append(
                _route(match | {"headers": [*match["headers"], special]}, action, config)
                | {"request_headers_to_add": [set_header(TRACK_HEADER, test.track)]}
                | _unbuffered(protocol)
            )
        split = _split(protocol, shares) | _mirror(protocol, shares)
        found.append(_route(match, split, config) | _unbuffered(protocol))
    return [*found, _plain(read_path(name), config)]


def _split(protocol: str, shares: Shares) -> Value:
    """Candidate first: a client's point on 0..PARTS never changes, so more share keeps its own."""
    candidate = round(shares.candidate * PARTS)
    weights = {"candidate": candidate, "stable": PARTS - candidate}
    clusters = [
        {
            "name": f"{protocol}-{track}",
            "weight": weight,
            "request_headers_to_add": [set_header(TRACK_HEADER, track)],
        }
        for track, weight in weights.items()
    ]
    weighted: Value = {"clusters": clusters}
    if not shares.sticky:
        return {"weighted_clusters": weighted}
    by_header = [
        {"header": {"header_name": name}, "terminal": True}
        for name in (SUBJECT_HEADER, KEY_HEADER, CERTIFICATE_HEADER)
    ]
    by_address = {"connection_properties": {"source_ip": True}}
    return {
        "weighted_clusters": weighted | {"use_hash_policy": True},
        "hash_policy": [*by_header, by_address],
    }


def _mirror(protocol: str, shares: Shares) -> Value:
    parts = round(shares.mirror * PARTS)
    if not parts:
        return {}
    fraction = {"numerator": parts, "denominator": "TEN_THOUSAND"}
    policy = {
        "cluster": f"{protocol}-shadow",
        "runtime_fraction": {"default_value": fraction},
        "request_headers_mutations": [{"append": set_header(TRACK_HEADER, "shadow")}],
        "disable_shadow_host_suffix_append": True,
    }
    return {"request_mirror_policies": [policy]}


def _plain(regex: str, config: GatewayConfig) -> Value:
    """Reads alone: they may be repeated wherever the response failed."""
    match = {"safe_regex": {"regex": regex}, "headers": [read_method()]}
    retry = {"retry_on": f"{RETRY_SAFE},reset,retriable-status-codes", "num_retries": 1}
    action = {
        "cluster": "http-stable",
        "retry_policy": retry | {"retriable_status_codes": [503]},
    }
    return _route(match, action, config)


def _grpc_route(path: str, config: GatewayConfig) -> Value:
    match = {"path": path}
    track = {"request_headers_to_add": [set_header(TRACK_HEADER, "stable")]}
    return _route(match, {"cluster": "grpc-stable"}, config) | track | _unbuffered("grpc")


def _route(match: Value, action: Value, config: GatewayConfig) -> Value:
    common = {"timeout": seconds(config.timeout_s), "retry_policy": _retry(len(config.http) > 1)}
    return {"match": match, "route": common | action}


def _retry(has_others: bool) -> Value:
    """Once more where nothing was computed; a full queue (503) only at another server."""
    policy: Value = {"retry_on": RETRY_SAFE, "num_retries": 1}
    if has_others:
        policy["retry_on"] += ",retriable-status-codes"
        policy |= {"retriable_status_codes": [503]} | fragment("other_hosts")
    return policy


def _unbuffered(protocol: str) -> dict[str, Any]:
    """A gRPC server bounds its messages by itself, and streams must not wait for their end."""
    if protocol != "grpc":
        return {}
    setting = typed(FILTERS + "buffer.v3.BufferPerRoute", disabled=True)
    return {"typed_per_filter_config": {"envoy.filters.http.buffer": setting}}
