"""The gateway's one listener: TLS 1.3, and the filters that every request passes.

A token lets a request through by signature and audience first, then role, model and tenant. The
gateway judges tokens only. API keys and certificates are passed to the server, which judges all of
them, tokens again too: Envoy would have to keep API keys in clear.
"""

from __future__ import annotations

import re

from infra.gateway.config import GatewayPlan, host_and_port
from infra.gateway.routing import (
    CERTIFICATE_HEADER,
    FILTERS,
    GRPC_HEALTH,
    ROUTES,
    SUBJECT_HEADER,
    TLS,
    Value,
    certificate_files,
    exact,
    follow,
    fragment,
    has_header,
    header,
    infer_path,
    issuer_cluster,
    read_method,
    read_path,
    seconds,
    security_headers,
    set_header,
    socket_address,
    typed,
)
from serving.config import MAX_HEADER_BYTES
from serving.security.certificates import Pair
from serving.security.config import (
    ISSUER_TIMEOUT_S,
    KEY_HEADER,
    LEEWAY_S,
    IssuerConfig,
    Rate,
    SecurityConfig,
)

CERTIFICATE = "edge"
MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
CONNECTION_BUFFER_BYTES = 2**20
UNREAD = "the request cannot be read: look at its path (no %2F in it), its headers and its length"
AWAY = "no server is reached behind the edge now; come again"
JWT_FILTER = "envoy.filters.http.jwt_authn"
CLAIMS = "claims"
CACHED_TOKENS = 1000
"""Verified tokens that each worker remembers until they end."""
MAX_KEYS_AGE_S = 60
"""Envoy reads keys again when they are old, never because one is unknown."""


def listener(plan: GatewayPlan) -> Value:
    """The listener."""
    chain = {"transport_socket": _tls(plan), "filters": [_manager(plan)]}
    return typed(
        "envoy.config.listener.v3.Listener",
        name="edge",
        address=socket_address(*host_and_port(plan.config.listen)),
        per_connection_buffer_limit_bytes=CONNECTION_BUFFER_BYTES,
        filter_chains=[chain],
    )


def secrets(plan: GatewayPlan) -> list[Value]:
    """The certificate that clients see; a renewed one is taken without a restart."""
    pair = public_pair(plan)
    watched = {"watched_directory": {"path": str(pair.certificate.parent)}}
    certificate = certificate_files(pair) | watched
    return [typed(TLS + "Secret", name=CERTIFICATE, tls_certificate=certificate)]


def public_pair(plan: GatewayPlan) -> Pair:
    """Certificate and key for clients: those named, or those made here."""
    config = plan.config
    if config.certificate is not None and config.key is not None:
        return Pair(config.certificate, config.key)
    return Pair.at(plan.files.certificates, "public")


def _tls(plan: GatewayPlan) -> Value:
    context: Value = {
        "tls_params": fragment("tls_1_3"),
        "alpn_protocols": ["h2", "http/1.1"],
        "tls_certificate_sds_secret_configs": [
            {"name": CERTIFICATE, "sds_config": follow(plan.files.resource("secrets"))}
        ],
    }
    if plan.config.client_ca is not None:
        context["validation_context"] = {"trusted_ca": {"filename": str(plan.config.client_ca)}}
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": typed(TLS + "DownstreamTlsContext", common_tls_context=context),
    }


def _manager(plan: GatewayPlan) -> Value:
    config = plan.config
    manager = typed(
        MANAGER,
        **fragment("manager"),
        rds={"route_config_name": ROUTES, "config_source": follow(plan.files.resource("routes"))},
        http_filters=_filters(plan),
        access_log=[_access_log(plan)],
        forward_client_cert_details="SANITIZE_SET" if config.client_ca else "SANITIZE",
        request_timeout=seconds(2 * config.timeout_s),
        max_request_headers_kb=MAX_HEADER_BYTES // 1024,
        local_reply_config={"mappers": _own_answers(), "body_format": fragment("error_body")},
    )
    if config.traces is not None:
        manager["tracing"] = _tracing(config.traces, config.traced_share)
    return {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}


def _filters(plan: GatewayPlan) -> list[Value]:
    config = plan.config
    found = [_limit("addresses", {"remote_address": {}}, config.address_limit, config.max_clients)]
    if plan.security.issuers:
        subject = {"header_name": SUBJECT_HEADER, "descriptor_key": "subject"}
        by_subject: Value = {"request_headers": subject}
        found += [jwt_filter(plan), role_filter(plan)]
        found.append(_limit("subjects", by_subject, config.limit, config.max_clients))
    found.append(
        _filter("buffer", "buffer.v3.Buffer", max_request_bytes=plan.security.max_body_bytes)
    )
    return [*found, _filter("router", "router.v3.Router", suppress_envoy_headers=True)]


def _limit(name: str, action: Value, rate: Rate, most: int) -> Value:
    """A bucket for each value of what the action looks at; the server has the exact bound.

    Envoy fills buckets in whole tokens, at most every 50 ms.
    """
    key = action.get("request_headers", {}).get("descriptor_key", "remote_address")
    tokens = max(1, round(rate.per_s))
    bucket = {
        "max_tokens": max(rate.burst, tokens),
        "tokens_per_fill": tokens,
        "fill_interval": seconds(tokens / rate.per_s),
    }
    return _filter(
        f"local_ratelimit.{name}",
        "local_ratelimit.v3.LocalRateLimit",
        **fragment("rate_limit"),
        stat_prefix=name,
        rate_limits=[{"actions": [action]}],
        descriptors=[{"entries": [{"key": key}], "token_bucket": bucket}],
        max_dynamic_descriptors=most,
    )


def _filter(name: str, kind: str, **fields: object) -> Value:
    return {"name": f"envoy.filters.http.{name}", "typed_config": typed(FILTERS + kind, **fields)}


def _access_log(plan: GatewayPlan) -> Value:
    fields: Value = {"log_format": {"json_format": fragment("access_log")}}
    name, kind = "stdout", "stream.v3.StdoutAccessLog"
    if plan.config.access_log is not None:
        name, kind = "file", "file.v3.FileAccessLog"
        fields["path"] = str(plan.config.access_log)
    config = typed(f"envoy.extensions.access_loggers.{kind}", **fields)
    return {"name": f"envoy.access_loggers.{name}", "typed_config": config}


def _own_answers() -> list[Value]:
    """Security headers on every answer that Envoy makes, also where no route was chosen.

    Envoy's own text is empty for a request that it cannot read, and has details of the connection
    for a server that does not answer: neither helps a client.
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


def jwt_filter(plan: GatewayPlan) -> Value:
    """Checks bearer tokens; lets through those who present something else."""
    issuers = plan.security.issuers
    names = [issuer_cluster(index) for index in range(len(issuers))]
    providers = {
        name: _provider(index, issuer)
        for index, (name, issuer) in enumerate(zip(names, issuers, strict=True))
    }
    known: list[Value] = [{"provider_name": name} for name in names]
    other: Value = {"requires_any": {"requirements": [*known, {"allow_missing": {}}]}}
    rules: list[Value] = [{"match": {"prefix": "/v2/health/"}}, {"match": {"path": GRPC_HEALTH}}]
    rules += [
        {"match": {"prefix": "/", "headers": [has_header(name)]}, "requires": other}
        for name in (KEY_HEADER, CERTIFICATE_HEADER)
    ]
    needed: Value = known[0] if len(known) == 1 else {"requires_any": {"requirements": known}}
    rules.append({"match": {"prefix": "/"}, "requires": needed})
    kind = "jwt_authn.v3.JwtAuthentication"
    return _filter("jwt_authn", kind, providers=providers, rules=rules)


def role_filter(plan: GatewayPlan) -> Value:
    """Lets a token through where its roles and tenant allow this action on this model."""
    security = plan.security
    no_token = {"not_id": {"or_ids": {"ids": [_issued_by(i) for i in security.issuers]}}}
    models = [
        {"url_path": {"path": {"safe_regex": {"regex": path(name)}}}}
        for name in plan.config.models
        for path in (infer_path, read_path)
    ]
    policies: Value = {
        "others-are-judged-by-the-server": {
            "permissions": [{"any": True}],
            "principals": [no_token],
        },
        "server-and-health": {
            "permissions": [{"not_rule": {"or_rules": {"rules": models}}}],
            "principals": [{"any": True}],
        },
    }
    for name in plan.config.models:
        for action, method, path in (
            ("infer", header(":method", "POST"), infer_path),
            ("read", read_method(), read_path),
        ):
            what: list[Value] = [
                {"header": method},
                {"url_path": {"path": {"safe_regex": {"regex": path(name)}}}},
            ]
            if allowed := _allowed(security, action, name):
                policies[f"{action}-{name}"] = {
                    "permissions": [{"and_rules": {"rules": what}}],
                    "principals": allowed,
                }
    return _filter("rbac", "rbac.v3.RBAC", rules={"action": "ALLOW", "policies": policies})


def _provider(index: int, issuer: IssuerConfig) -> Value:
    provider: Value = {
        "issuer": issuer.issuer,
        "audiences": [issuer.audience],
        "forward": True,  # the server checks it again
        "from_headers": [
            {"name": "Authorization", "value_prefix": prefix} for prefix in ("Bearer ", "bearer ")
        ],  # names of schemes have no case, and clients send both
        "require_expiration": True,
        "clock_skew_seconds": LEEWAY_S,
        "payload_in_metadata": CLAIMS,
        "claim_to_headers": [{"header_name": SUBJECT_HEADER, "claim_name": issuer.subject_claim}],
        "jwt_cache_config": {"jwt_cache_size": CACHED_TOKENS},
        "clear_route_cache": True,  # the subject decides between stable and candidate
    }
    return provider | (_remote_keys(index, issuer) if issuer.is_remote else _local_keys(issuer))


def _remote_keys(index: int, issuer: IssuerConfig) -> Value:
    timeout = seconds(ISSUER_TIMEOUT_S)
    uri = {"uri": issuer.keys, "cluster": issuer_cluster(index), "timeout": timeout}
    age = seconds(min(issuer.refresh_s, MAX_KEYS_AGE_S))
    return {
        "remote_jwks": {
            "http_uri": uri,
            "cache_duration": age,
            "async_fetch": {"fast_listener": True, "failed_refetch_duration": "1s"},
        }
    }


def _local_keys(issuer: IssuerConfig) -> Value:
    """The file's content: Envoy takes other keys as soon as `prepare` has read them."""
    with open(str(issuer.keys), encoding="utf-8") as stream:
        return {"local_jwks": {"inline_string": stream.read()}}


def _allowed(security: SecurityConfig, action: str, model: str) -> list[Value]:
    """Tokens that may; one entry an issuer, since each names roles and tenants its own way."""
    wanted = {f"{action}:{model}", f"{action}:*"}
    names = sorted(wanted | {n for n, grants in security.grants.items() if wanted & set(grants)})
    found = []
    for issuer in security.issuers:
        tenant = _tenant_rule(issuer, security.owners.get(model))
        if tenant is None:
            continue
        roles = [_claim(issuer.roles_claim, matcher) for name in names for matcher in _holds(name)]
        ids = [_issued_by(issuer), {"or_ids": {"ids": roles}}, *tenant]
        found.append({"and_ids": {"ids": ids}})
    return found


def _tenant_rule(issuer: IssuerConfig, owner: str | None) -> list[Value] | None:
    """What else must be in the token; None where no token of this issuer may."""
    if owner is None:
        return []
    if issuer.tenant_claim is not None:
        return [_claim(issuer.tenant_claim, {"string_match": exact(owner)})]
    return [] if issuer.tenant in ("", owner) else None


def _holds(role: str) -> list[Value]:
    """A role in a list, or between blanks in a text."""
    text = re.escape(role)
    return [
        {"list_match": {"one_of": {"string_match": exact(role)}}},
        {"string_match": {"safe_regex": {"regex": rf"(.* )?{text}( .*)?"}}},
    ]


def _issued_by(issuer: IssuerConfig) -> Value:
    return _claim("iss", {"string_match": exact(issuer.issuer)})


def _claim(path: str, matcher: Value) -> Value:
    keys = [{"key": key} for key in (CLAIMS, *path.split("."))]
    metadata = {"filter": JWT_FILTER, "path": keys, "value": matcher}
    return {"sourced_metadata": {"metadata_matcher": metadata}}
