"""Whose token lets a request through: signature and audience first, then role, model and tenant.

The edge judges tokens only. API keys and certificates go on to the server, which judges all of
them, tokens again too: Envoy would have to keep API keys in clear.
"""

from __future__ import annotations

import re

from infra.gateway.clusters import issuer_cluster
from infra.gateway.config import EdgePlan
from infra.gateway.routes import GRPC_HEALTH, infer_path, read_path
from infra.gateway.values import (
    CERTIFICATE_HEADER,
    FILTERS,
    SUBJECT_HEADER,
    Value,
    exact,
    has_header,
    header,
    read_method,
    seconds,
    typed,
)
from serving.security.config import KEY_HEADER, IssuerConfig, SecurityConfig

JWT_FILTER = "envoy.filters.http.jwt_authn"
CLAIMS = "claims"
CACHED_TOKENS = 1000
"""Verified tokens that each worker remembers until they end."""
MAX_KEYS_AGE_S = 60
"""Envoy reads keys again when they are old, never because one is unknown."""


def jwt_filter(plan: EdgePlan) -> Value:
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
    return {
        "name": JWT_FILTER,
        "typed_config": typed(
            FILTERS + "jwt_authn.v3.JwtAuthentication", providers=providers, rules=rules
        ),
    }


def role_filter(plan: EdgePlan) -> Value:
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
    return {
        "name": "envoy.filters.http.rbac",
        "typed_config": typed(
            FILTERS + "rbac.v3.RBAC", rules={"action": "ALLOW", "policies": policies}
        ),
    }


def _provider(index: int, issuer: IssuerConfig) -> Value:
    provider: Value = {
        "issuer": issuer.issuer,
        "audiences": [issuer.audience],
        "forward": True,  # the server checks it again
        "from_headers": [
            {"name": "Authorization", "value_prefix": prefix} for prefix in ("Bearer ", "bearer ")
        ],  # names of schemes have no case, and clients send both
        "require_expiration": True,
        "clock_skew_seconds": max(1, round(issuer.leeway_s)),
        "payload_in_metadata": CLAIMS,
        "claim_to_headers": [{"header_name": SUBJECT_HEADER, "claim_name": issuer.subject_claim}],
        "jwt_cache_config": {"jwt_cache_size": CACHED_TOKENS},
        "clear_route_cache": True,  # the subject decides between stable and candidate
    }
    return provider | (_remote_keys(index, issuer) if issuer.is_remote else _local_keys(issuer))


def _remote_keys(index: int, issuer: IssuerConfig) -> Value:
    uri = {
        "uri": issuer.keys,
        "cluster": issuer_cluster(index),
        "timeout": seconds(issuer.timeout_s),
    }
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
