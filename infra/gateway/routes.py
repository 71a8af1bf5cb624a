"""Which requests go where: only what is listed here is let through, by model, slot and share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from infra.gateway.config import EdgeConfig, EdgePlan, ModelConfig
from infra.gateway.shares import PARTS, Shares
from infra.gateway.values import (
    ADDRESS_HEADER,
    CERTIFICATE_HEADER,
    FILTERS,
    SUBJECT_HEADER,
    Value,
    header,
    read_method,
    seconds,
    security_headers,
    set_header,
    typed,
)
from serving.calls import GRPC_MODEL_HEADER, SLOT_HEADER
from serving.security.config import KEY_HEADER

ROUTES = "falaj"
GRPC_SERVICE = "/inference.GRPCInferenceService/"
GRPC_HEALTH = "/grpc.health.v1.Health/Check"
GRPC_METHODS = ("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata")
VERSION = r"(/versions/[^/]+)?"
RETRY_SAFE = "connect-failure,refused-stream,reset-before-request"
"""The server has seen nothing of the request, so it cannot be computed twice."""


def route_configuration(plan: EdgePlan, shares: Mapping[str, Shares]) -> Value:
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
        virtual_hosts=[{"name": "all", "domains": ["*"], "routes": [*routes, _nothing_here()]}],
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
    """Regular expression of the paths that tell of a model."""
    return rf"/v2/models/{re.escape(model)}{VERSION}(/ready)?"


def _model_routes(name: str, model: ModelConfig, shares: Shares, config: EdgeConfig) -> list[Value]:
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
            action = {"cluster": f"{protocol}-{test.slot}"} | _mirror(protocol, shares)
            found.append(
                _route(match | {"headers": [*match["headers"], special]}, action, config)
                | {"request_headers_to_add": [set_header(SLOT_HEADER, test.slot)]}
                | _unbuffered(protocol)
            )
        split = _split(protocol, shares) | _mirror(protocol, shares)
        found.append(_route(match, split, config) | _unbuffered(protocol))
    return [*found, _plain(read_path(name), config)]


def _split(protocol: str, shares: Shares) -> Value:
    """Candidate first: a client's place on 0..PARTS never changes, so more share keeps its own."""
    candidate = round(shares.candidate * PARTS)
    weights = {"candidate": candidate, "stable": PARTS - candidate}
    clusters = [
        {
            "name": f"{protocol}-{slot}",
            "weight": weight,
            "request_headers_to_add": [set_header(SLOT_HEADER, slot)],
        }
        for slot, weight in weights.items()
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
        "request_headers_mutations": [{"append": set_header(SLOT_HEADER, "shadow")}],
        "disable_shadow_host_suffix_append": True,
    }
    return {"request_mirror_policies": [policy]}


def _plain(regex: str, config: EdgeConfig) -> Value:
    """Reads alone: they may be asked again wherever the answer failed."""
    match = {"safe_regex": {"regex": regex}, "headers": [read_method()]}
    retry = {"retry_on": f"{RETRY_SAFE},reset,retriable-status-codes", "num_retries": 1}
    action = {
        "cluster": "http-stable",
        "retry_policy": retry | {"retriable_status_codes": [503]},
    }
    return _route(match, action, config)


def _grpc_route(path: str, config: EdgeConfig) -> Value:
    match = {"path": path}
    slot = {"request_headers_to_add": [set_header(SLOT_HEADER, "stable")]}
    return _route(match, {"cluster": "grpc-stable"}, config) | slot | _unbuffered("grpc")


def _route(match: Value, action: Value, config: EdgeConfig) -> Value:
    many = len(config.http) > 1
    common: Value = {
        "timeout": seconds(config.timeout_s),
        "retry_policy": _retry(many),
    }
    return {"match": match, "route": common | action}


def _retry(has_others: bool) -> Value:
    """Once more where nothing was computed; a full queue (503) only at another server."""
    policy: Value = {"retry_on": RETRY_SAFE, "num_retries": 1}
    if has_others:
        policy["retry_on"] += ",retriable-status-codes"
        policy["retriable_status_codes"] = [503]
        policy["retry_host_predicate"] = [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": typed(
                    "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                ),
            }
        ]
    return policy


def _unbuffered(protocol: str) -> dict[str, Any]:
    """A gRPC server bounds its messages by itself, and streams must not wait for their end."""
    if protocol != "grpc":
        return {}
    setting = typed(FILTERS + "buffer.v3.BufferPerRoute", disabled=True)
    return {"typed_per_filter_config": {"envoy.filters.http.buffer": setting}}


def _nothing_here() -> Value:
    body = "there is nothing here: no such path, or no such model"
    return {
        "match": {"prefix": "/"},
        "direct_response": {"status": 404, "body": {"inline_string": body}},
    }
