"""The edge's one listener: TLS 1.3, and the filters that every request passes."""

from __future__ import annotations

from infra.gateway.config import EdgePlan, host_and_port
from infra.gateway.routes import ROUTES
from infra.gateway.rules import jwt_filter, role_filter
from infra.gateway.values import (
    FILTERS,
    SUBJECT_HEADER,
    TLS,
    Value,
    follow,
    seconds,
    security_headers,
    set_header,
    socket_address,
    typed,
)
from serving.security.certificates import Pair
from serving.security.config import Rate

CERTIFICATE = "edge"
MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
HEADERS_TIMEOUT_S, IDLE_S = 10, 300
CONNECTION_BUFFER_BYTES = 2**20
MAX_STREAMS = 128
UNREAD = "the request cannot be read: look at its path (no %2F in it), its headers and its length"
AWAY = "no server is reached behind the edge now; come again"

ACCESS_LOG = {
    "time": "%START_TIME%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "trace": "%REQ(TRACEPARENT)%",
    "subject": f"%REQ({SUBJECT_HEADER.upper()})%",
    "address": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
    "method": "%REQ(:METHOD)%",
    "path": "%PATH(NQ)%",
    "protocol": "%PROTOCOL%",
    "tls": "%DOWNSTREAM_TLS_VERSION%",
    "status": "%RESPONSE_CODE%",
    "grpc_status": "%GRPC_STATUS%",
    "why": "%RESPONSE_CODE_DETAILS%",
    "flags": "%RESPONSE_FLAGS%",
    "received_bytes": "%BYTES_RECEIVED%",
    "sent_bytes": "%BYTES_SENT%",
    "ms": "%DURATION%",
    "upstream": "%UPSTREAM_CLUSTER%",
    "host": "%UPSTREAM_HOST%",
    "version": "%RESP(X-FALAJ-VERSION)%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
}


def listener(plan: EdgePlan) -> Value:
    """The listener."""
    chain = {"transport_socket": _tls(plan), "filters": [_manager(plan)]}
    return typed(
        "envoy.config.listener.v3.Listener",
        name="edge",
        address=socket_address(*host_and_port(plan.config.listen)),
        per_connection_buffer_limit_bytes=CONNECTION_BUFFER_BYTES,
        filter_chains=[chain],
    )


def secrets(plan: EdgePlan) -> list[Value]:
    """The certificate that clients see; a renewed one is taken without a restart."""
    pair = public_pair(plan)
    certificate = {
        "certificate_chain": {"filename": str(pair.certificate)},
        "private_key": {"filename": str(pair.key)},
        "watched_directory": {"path": str(pair.certificate.parent)},
    }
    return [
        typed(TLS + "Secret", name=CERTIFICATE, tls_certificate=certificate),
    ]


def public_pair(plan: EdgePlan) -> Pair:
    """Certificate and key for clients: those named, or those made here."""
    config = plan.config
    if config.certificate is not None and config.key is not None:
        return Pair(config.certificate, config.key)
    return Pair.at(plan.place.certificates, "public")


def _tls(plan: EdgePlan) -> Value:
    context: Value = {
        "tls_params": {
            "tls_minimum_protocol_version": "TLSv1_3",
            "tls_maximum_protocol_version": "TLSv1_3",
        },
        "alpn_protocols": ["h2", "http/1.1"],
        "tls_certificate_sds_secret_configs": [
            {"name": CERTIFICATE, "sds_config": follow(plan.place.resource("secrets"))}
        ],
    }
    if plan.config.client_ca is not None:
        context["validation_context"] = {"trusted_ca": {"filename": str(plan.config.client_ca)}}
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": typed(TLS + "DownstreamTlsContext", common_tls_context=context),
    }


def _manager(plan: EdgePlan) -> Value:
    config, sizes = plan.config, plan.security.sizes
    manager = typed(
        MANAGER,
        stat_prefix="edge",
        rds={"route_config_name": ROUTES, "config_source": follow(plan.place.resource("routes"))},
        early_header_mutation_extensions=[_without_internal_headers()],
        http_filters=_filters(plan),
        access_log=[_access_log(plan)],
        use_remote_address=True,
        forward_client_cert_details="SANITIZE_SET" if config.client_ca else "SANITIZE",
        set_current_client_cert_details={"subject": True},
        generate_request_id=True,
        always_set_request_id_in_response=True,
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action="REJECT_REQUEST",
        server_name="falaj",
        request_headers_timeout=seconds(HEADERS_TIMEOUT_S),
        request_timeout=seconds(2 * config.timeout_s),
        stream_idle_timeout=seconds(IDLE_S),
        max_request_headers_kb=max(1, min(8192, sizes.max_header_bytes // 1024)),
        common_http_protocol_options={
            "idle_timeout": seconds(IDLE_S),
            "max_headers_count": 100,
            "headers_with_underscores_action": "REJECT_REQUEST",
        },
        http2_protocol_options={
            "max_concurrent_streams": MAX_STREAMS,
            "initial_stream_window_size": 2**18,
            "initial_connection_window_size": 2**20,
        },
        local_reply_config={"mappers": _own_answers(), "body_format": _error_body()},
    )
    if config.traces is not None:
        manager["tracing"] = _tracing(config.traces, config.traced_share)
    return {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}


def _without_internal_headers() -> Value:
    """What only edge and server may say is removed before anything reads it."""
    remove = {"remove_on_match": {"key_matcher": {"prefix": "x-falaj-", "ignore_case": True}}}
    return {
        "name": "envoy.http.early_header_mutation.header_mutation",
        "typed_config": typed(
            "envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
            mutations=[remove],
        ),
    }


def _filters(plan: EdgePlan) -> list[Value]:
    config = plan.config
    found = [_limit("addresses", {"remote_address": {}}, config.address_limit, config.max_clients)]
    if plan.security.issuers:
        subject = {"header_name": SUBJECT_HEADER, "descriptor_key": "subject"}
        by_subject: Value = {"request_headers": subject}
        found += [jwt_filter(plan), role_filter(plan)]
        found.append(_limit("subjects", by_subject, config.limit, config.max_clients))
    found.append(_filter("buffer", "buffer.v3.Buffer", max_request_bytes=_max_body(plan)))
    return [*found, _filter("router", "router.v3.Router", suppress_envoy_headers=True)]


def _max_body(plan: EdgePlan) -> int:
    return plan.security.sizes.max_body_bytes


def _limit(name: str, action: Value, rate: Rate, most: int) -> Value:
    """A bucket for each value of what the action looks at; the server has the exact bound.

    Envoy fills buckets in whole tokens, at most every 50 ms.
    """
    key = action.get("request_headers", {}).get("descriptor_key", "remote_address")
    bucket = _bucket(rate)
    unlimited = {"max_tokens": 2**31, "tokens_per_fill": 2**31, "fill_interval": "1s"}
    always = {"default_value": {"numerator": 100, "denominator": "HUNDRED"}}
    return {
        "name": f"envoy.filters.http.local_ratelimit.{name}",
        "typed_config": typed(
            FILTERS + "local_ratelimit.v3.LocalRateLimit",
            stat_prefix=name,
            token_bucket=unlimited,
            filter_enabled=always,
            filter_enforced=always,
            rate_limits=[{"actions": [action]}],
            descriptors=[{"entries": [{"key": key}], "token_bucket": bucket}],
            max_dynamic_descriptors=most,
            response_headers_to_add=[
                {"header": {"key": "retry-after", "value": "1"}, "append_action": "ADD_IF_ABSENT"}
            ],
        ),
    }


def _bucket(rate: Rate) -> Value:
    tokens = max(1, round(rate.per_s))
    return {
        "max_tokens": max(rate.burst, tokens),
        "tokens_per_fill": tokens,
        "fill_interval": seconds(tokens / rate.per_s),
    }


def _filter(name: str, kind: str, **fields: object) -> Value:
    return {"name": f"envoy.filters.http.{name}", "typed_config": typed(FILTERS + kind, **fields)}


def _access_log(plan: EdgePlan) -> Value:
    fields: Value = {"log_format": {"json_format": ACCESS_LOG}}
    kind = "StdoutAccessLog"
    if plan.config.access_log is not None:
        kind, fields["path"] = "FileAccessLog", str(plan.config.access_log)
    package = "file" if kind == "FileAccessLog" else "stream"
    return {
        "name": f"envoy.access_loggers.{'file' if package == 'file' else 'stdout'}",
        "typed_config": typed(f"envoy.extensions.access_loggers.{package}.v3.{kind}", **fields),
    }


def _own_answers() -> list[Value]:
    """Security headers on every answer that Envoy makes, also where no route was chosen.

    What it says of a request that it cannot read is nothing, or of a server that does not answer,
    how it was not reached: neither helps a client.
    """
    unread: Value = {"body": {"inline_string": UNREAD}}
    away: Value = {"body": {"inline_string": AWAY}}
    return [
        _mapper("EQ", 400, unread),
        _mapper("EQ", 503, away, set_header("retry-after", "1")),
        _mapper("GE", 0, {}),
    ]


def _mapper(op: str, status: int, change: Value, *headers: Value) -> Value:
    comparison = {"op": op, "value": {"default_value": status, "runtime_key": f"edge.{status}"}}
    return change | {
        "filter": {"status_code_filter": {"comparison": comparison}},
        "headers_to_add": [*security_headers(), *headers],
    }


def _error_body() -> Value:
    """Refusals of the edge look like those of the server."""
    return {"json_format": {"error": "%LOCAL_REPLY_BODY%", "request_id": "%REQ(X-REQUEST-ID)%"}}


def _tracing(url: str, share: float) -> Value:
    uri = {"uri": url, "cluster": "traces", "timeout": "1s"}
    provider = {
        "name": "envoy.tracers.opentelemetry",
        "typed_config": typed(
            "envoy.config.trace.v3.OpenTelemetryConfig",
            http_service={"http_uri": uri},
            service_name="falaj-edge",
        ),
    }
    percent = {"value": 100 * share}
    return {"provider": provider, "random_sampling": percent, "spawn_upstream_span": True}
