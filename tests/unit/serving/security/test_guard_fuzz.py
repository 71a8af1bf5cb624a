"""Whatever is presented, the guard answers with a principal or a refusal of its own."""

import json
from typing import Any

import jwt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jwt.utils import base64url_encode

from serving.errors import ServingError
from serving.interfaces import Principal
from serving.security.config import Rate
from serving.security.guard import SecurityGuard
from serving.security.keys import create_key
from tests.support.services.signing import AUDIENCE, Signer
from tests.support.serving.guards import BEHIND_EDGE, ISSUER, World

SIGNER = Signer(ISSUER)
PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
CLAIMS = st.sampled_from(["iss", "aud", "exp", "nbf", "iat", "sub", "realm", "org", "jti"])


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> SecurityGuard:
    world = World(tmp_path_factory.mktemp("guard"), SIGNER)
    api_keys = world.folder / "api.json"
    create_key(api_keys, "a", ("infer:m",))
    claims = {"roles_claim": "realm.roles", "tenant_claim": "org"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("serving.security.guard.FAILURES", Rate(per_s=1e9, burst=10**9))
        return world.guard(
            claims, api_keys=str(api_keys), certificates={"CN=batch": ["infer:m"]}, **BEHIND_EDGE
        )


def admit(guard: SecurityGuard, name: bytes, value: bytes) -> Principal | None:
    try:
        return guard.admit([(name, value)], "192.0.2.1", "infer", "m")
    except ServingError:
        return None


@given(st.sampled_from([b"authorization", b"x-api-key", b"x-forwarded-client-cert"]), st.binary())
def test_bytes_are_refused(guard: SecurityGuard, name: bytes, value: bytes) -> None:
    assert admit(guard, name, value) is None
    assert admit(guard, name, b"Bearer " + value) is None


@given(st.dictionaries(st.sampled_from(["alg", "kid", "typ", "crit", "jku", "jwk", "b64"]), PLAIN))
def test_any_header_of_a_token_is_refused(guard: SecurityGuard, header: dict[str, Any]) -> None:
    claims = {"iss": ISSUER, "aud": AUDIENCE, "exp": 4_000_000_000, "sub": "a", "org": "b"}
    parts = [base64url_encode(json.dumps(part).encode()) for part in (header, claims)]
    assert admit(guard, b"authorization", b"Bearer " + b".".join([*parts, b"AAAA"])) is None


@given(st.dictionaries(CLAIMS, PLAIN))
@example({"exp": float("inf")})
@example({"exp": float("nan")})
@example({"exp": 10**400})
@example({"nbf": float("inf")})
@example({"iat": -(10**400)})
@example({"exp": "9" * 5000})
@example({"aud": [AUDIENCE, {}]})
@example({"realm": {"roles": [["infer:m"], {"a": "b"}, None]}})
def test_any_claims_that_are_well_signed_are_judged(
    guard: SecurityGuard, claims: dict[str, Any]
) -> None:
    usual = {"iss": ISSUER, "aud": AUDIENCE, "exp": 4_000_000_000, "sub": "a", "org": "b"}
    text = json.dumps(usual | claims).encode()
    token = jwt.api_jws.encode(text, SIGNER.key, algorithm="ES256", headers={"kid": "one"})
    found = admit(guard, b"authorization", b"Bearer " + token.encode())
    assert found is None or (found.subject and found.tenant)


def test_deep_json_is_refused(guard: SecurityGuard) -> None:
    deep = base64url_encode(b"[" * 3000 + b"]" * 3000)
    for parts in ((deep, deep), (base64url_encode(b'{"alg":"ES256"}'), deep)):
        assert admit(guard, b"authorization", b"Bearer " + b".".join([*parts, b"AA"])) is None
