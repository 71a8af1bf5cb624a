"""The guard alone: tokens, keys, tenants, limits, and what it remembers."""

import json
import re
import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from hypothesis import example, given
from hypothesis import strategies as st
from jwt.utils import base64url_encode

from serving.errors import ForbiddenError, ServingError, TooManyRequestsError, UnauthorizedError
from serving.interfaces import Action, Guard, Headers, Principal
from serving.security.config import KEYS_FILE, Rate, SecurityConfig, SecuritySection
from serving.security.guard import SecurityGuard, secured
from serving.security.keys import create_key, revoke_key
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.tenants import Tenant, put_tenant
from tests.support.host.processes import wait_until
from tests.support.services.signing import AUDIENCE, Signer, forged_tokens, published

ADDRESS = "192.0.2.7"
ISSUER = "https://issuer.test"
TLS = {"certificate": "c", "key": "k", "client_ca": "a"}
BEHIND_EDGE: dict[str, Any] = {"behind_edge": True, "tls": TLS}
PLENTY = {"client": {"per_s": 1e6, "burst": 10**6}}


def guard_of(
    keys: str,
    clock: Callable[[], float] = lambda: 1000.0,
    issuer: dict[str, Any] | None = None,
    **config: Any,
) -> SecurityGuard:
    """A guard with one issuer whose keys are there, and limits that nobody reaches."""
    known = {"issuer": ISSUER, "audience": AUDIENCE, "keys": keys} | (issuer or {})
    content = {"issuers": [known], "limits": PLENTY} | config
    return SecurityGuard(SecurityConfig.model_validate(content), clock)


class World:
    """An issuer of tokens, a clock, and guards that know both."""

    now = 1000.0

    def __init__(self, folder: Path, signer: Signer | None = None) -> None:
        self.folder, self.signer = folder, signer or Signer(ISSUER)

    def guard(self, issuer: dict[str, Any] | None = None, **config: Any) -> SecurityGuard:
        """Keywords change what is known of the issuer, or the configuration."""
        keys = self.folder / "keys.json"
        keys.write_text(self.signer.keys())
        return guard_of(str(keys), lambda: self.now, issuer, **config)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def bearer(token: str) -> Headers:
    return [(b"accept", b"*/*"), (b"authorization", f"Bearer {token}".encode())]


def admit(
    guard: Guard, headers: Headers, action: Action = "infer", model: str | None = "m"
) -> Principal:
    return guard.admit(headers, ADDRESS, action, model)


def api_key(text: str) -> Headers:
    return [(b"x-api-key", text.encode())]


def refused(guard: Guard, presented: str | Headers) -> str:
    """Why a token, or what else is presented, lets nobody in."""
    headers = bearer(presented) if isinstance(presented, str) else presented
    with pytest.raises(UnauthorizedError) as found:
        admit(guard, headers)
    return str(found.value)


def test_roles_are_read_from_inside_an_object_and_stand_for_grants(world: World) -> None:
    guard = world.guard({"roles_claim": "realm.roles"}, grants={"analyst": ["infer:m", "read:*"]})
    token = world.signer.token(realm={"roles": ["analyst", 7, "unknown"]})
    assert admit(guard, bearer(token), "read", "other").subject == "somebody"
    with pytest.raises(ForbiddenError, match="may not infer on model other"):
        admit(guard, bearer(token), "infer", "other")
    with pytest.raises(ForbiddenError, match="may not admin on this server"):
        admit(guard, bearer(token), "admin", None)


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"exp": 1_700_000_000}, "expired"),
        ({"exp": None}, "exp"),
        ({"nbf": 4_000_000_000}, "not yet valid"),
        ({"iat": 4_000_000_000}, "not yet valid"),
        ({"aud": "feast"}, "[Aa]udience"),
        ({"aud": None}, "aud"),
        ({"iss": "https://other.test"}, "issuer is not known"),
        ({"iss": None}, "issuer is not known"),
        ({"sub": None}, "sub"),
        ({"sub": ""}, "names nobody"),
    ],
    ids=str,
)
def test_claims_out_of_bounds_are_refused(world: World, claims: dict[str, Any], said: str) -> None:
    assert re.search(said, refused(world.guard(), world.signer.token("infer:m", **claims)))


def test_forged_tokens_are_refused(world: World) -> None:
    guard = world.guard()
    others = [
        *forged_tokens(world.signer, "infer:m"),
        world.signer.token("infer:m", key=rsa.generate_private_key(65537, 2048), alg="RS256"),
        world.signer.token("infer:m", key=ed25519.Ed25519PrivateKey.generate(), alg="EdDSA"),
        *("a.b.c", "", "x" * 9000),
    ]
    for token in others:
        refused(guard, token)


def short_key() -> dict[str, Any]:
    short = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(short.public_key()))
    return dict(public | {"kid": "short", "alg": "RS256"})


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ({"kty": "oct", "k": "AAAA", "kid": "a"}, "public ones only"),
        (short_key(), "holds no key that signs"),
    ],
    ids=["secret", "short"],
)
def test_keys_that_prove_nothing_are_refused(
    tmp_path: Path, key: dict[str, Any], said: str
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [key]}))
    with pytest.raises(ConfigurationError, match=said):
        guard_of(str(keys))


def test_a_file_with_new_keys_is_read_when_one_is_unknown(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.security.tokens.MIN_REFRESH_S", 1e-6)
    guard = world.guard()
    old = world.signer.token("infer:m")
    admit(guard, bearer(old))
    world.signer.rotate("two")
    (world.folder / "keys.json").write_text(world.signer.keys())
    assert admit(guard, bearer(world.signer.token("infer:m")))
    assert "not among its issuer's" in refused(guard, old)


def test_keys_at_a_url_are_read_again_beside_the_callers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.security.tokens.MIN_REFRESH_S", 1e-6)
    monkeypatch.setattr("serving.security.guard.FAILURES", Rate(per_s=1e6, burst=10**6))
    with published(world.signer) as url:
        guard = guard_of(url)
        world.signer.rotate("two")
        hints: list[float | None] = []

        def is_known() -> bool:
            try:
                admit(guard, bearer(world.signer.token("infer:m")))
            except UnauthorizedError as exc:
                hints.append(exc.retry_after_s)
                return False
            return True

        wait_until(is_known, "the new key is known")
        assert all(hints)


@pytest.mark.parametrize(
    "answer", [b"", b"no HTTP\r\n\r\n", b"HTTP/1.1 200\r\n\r\n" + b"[" * 10**5]
)
def test_an_issuer_that_gives_no_keys_lets_nobody_in_and_does_not_stop_the_start(
    world: World, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def once() -> None:
            asked, _ = listening.accept()
            with asked:
                asked.recv(4096)
                asked.sendall(answer)

        thread = threading.Thread(target=once)
        thread.start()
        guard = guard_of(f"http://127.0.0.1:{listening.getsockname()[1]}/keys")
        thread.join()
    assert "were not read" in caplog.text
    refused(guard, world.signer.token("infer:m"))


def test_tenants_are_kept_apart(world: World) -> None:
    guard = world.guard({"tenant_claim": "org"}, owners={"m": "acme"})
    own, other = (world.signer.token("infer:*", "admin:*", org=name) for name in ("acme", "globex"))
    assert admit(guard, bearer(own)).tenant == "acme"
    with pytest.raises(ForbiddenError, match="does not belong to globex"):
        admit(guard, bearer(other))
    assert admit(guard, bearer(other), "infer", "shared")
    assert admit(guard, bearer(own), "admin", "m")
    for shared in (None, "shared"):
        with pytest.raises(ForbiddenError, match="operators"):
            admit(guard, bearer(own), "admin", shared)
    assert "org names nobody" in refused(guard, world.signer.token("infer:*"))


def test_a_tenants_server_takes_tokens_and_keys_of_its_tenant_alone(world: World) -> None:
    file = world.folder / "api-keys.json"
    mine, theirs = (create_key(file, "k", ("infer:*",), name)[0] for name in ("red", "blue"))
    config = world.guard({"tenant_claim": "org"}, api_keys=str(file))._config
    guard = SecurityGuard(config, tenant="red")
    own, other = (world.signer.token("infer:*", "admin:*", org=name) for name in ("red", "blue"))
    assert admit(guard, bearer(own), "admin", "m").tenant == admit(guard, api_key(mine)).tenant
    for token in (other, world.signer.token("infer:*"), world.signer.token("infer:*", org="")):
        refused(guard, token)
    assert "of the tenant red" in refused(SecurityGuard(world.guard()._config, tenant="red"), own)
    with pytest.raises(ForbiddenError, match="does not belong to blue"):
        admit(guard, api_key(theirs))


def test_a_tenants_server_is_closed_where_nothing_is_said(tmp_path: Path) -> None:
    home = put_tenant(tmp_path, "red", Tenant())
    key, foreign = (create_key(f / KEYS_FILE, "nightly", ("infer:m",))[0] for f in (home, tmp_path))
    assert secured(SecuritySection(), tmp_path, "127.0.0.1") is None
    found = secured(SecuritySection(), home, "127.0.0.1")
    assert found and admit(found.guard, api_key(key)).subject == "nightly"  # noqa: PT018
    for presented in ([], api_key(foreign)):
        refused(found.guard, presented)


def test_api_keys_are_kept_as_digests_and_end(world: World) -> None:
    file = world.folder / "secrets" / "api-keys.json"
    text, key = create_key(file, "nightly", ("infer:m",), "acme")
    late, _ = create_key(file, "late", ("infer:m",), expires=datetime.now(UTC) - timedelta(1))
    guard = world.guard(api_keys=str(file))
    assert text not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    found = admit(guard, api_key(text))
    assert (found.subject, found.tenant) == ("nightly", "acme")
    for presented in (late, text[:-1] + "!", text.replace(key.id, "0" * 12), "falaj", ""):
        refused(guard, api_key(presented))
    revoke_key(file, key.id)
    world.now += 2
    assert f"{key.id} is revoked" in refused(guard, api_key(text))


def test_a_broken_file_of_keys_lets_nobody_in(world: World) -> None:
    file = world.folder / "api-keys.json"
    text, _ = create_key(file, "nightly", ("infer:m",))
    guard = world.guard(api_keys=str(file))
    admit(guard, api_key(text))
    file.write_text("{")
    world.now += 2
    assert "not known" in refused(guard, api_key(text))


def test_two_credentials_and_none_are_refused(world: World) -> None:
    guard = world.guard()
    both = [*bearer(world.signer.token("infer:m")), *api_key("falaj_x")]
    assert "several" in refused(guard, both)
    assert "nothing was presented" in refused(guard, [])
    assert "Bearer" in refused(guard, [(b"authorization", b"Basic YTpi")])


def test_a_certificate_counts_only_behind_the_edge(world: World) -> None:
    named = [(b"x-forwarded-client-cert", b'Hash=0;Subject="CN=batch,O=acme"')]
    assert "nothing was presented" in refused(world.guard(), named)
    with pytest.raises(ConfigurationError, match="none before it"):
        world.guard(certificates={"CN=batch,O=acme": ["infer:m"]})
    behind = world.guard(
        certificates={"CN=batch,O=acme": ["infer:m"]},
        certificate_tenants={"CN=batch,O=acme": "acme"},
        **BEHIND_EDGE,
    )
    assert admit(behind, named).tenant == "acme"
    for value in (b'Subject="CN=other"', b"Hash=0", b'Subject="CN=a";Subject="CN=batch,O=acme"'):
        refused(behind, [(b"x-forwarded-client-cert", value)])


def test_a_comma_in_a_name_makes_no_other_client(world: World) -> None:
    """RFC 2253 writes it as `\\,`; unmasked it would look like two names, those of another."""
    behind = world.guard(
        certificates={"CN=batch,O=acme": ["infer:m"], "CN=a\\,b": ["infer:m"]}, **BEHIND_EDGE
    )
    for subject in (rb"CN=batch\,O=acme", rb"CN=batc\h,O=acme"):
        assert "stands for nobody" in refused(behind, told_by_edge(subject))
    assert admit(behind, told_by_edge(rb"CN=a\,b")).subject == r"CN=a\,b"


def told_by_edge(subject: bytes) -> Headers:
    return [(b"x-forwarded-client-cert", b'Subject="%s"' % subject)]


def test_a_mirrored_copy_does_not_use_up_what_its_client_may_ask(world: World) -> None:
    limits = {"client": {"per_s": 1e-6, "burst": 2}}
    asked = bearer(world.signer.token("infer:m"))
    copy = [*asked, (b"x-falaj-slot", b"shadow")]
    guard = world.guard(limits=limits, **BEHIND_EDGE)
    for headers in (asked, copy, copy, copy, asked):
        admit(guard, headers)
    with pytest.raises(TooManyRequestsError):
        admit(guard, asked)
    alone = world.guard(limits=limits)  # anybody could say so there
    for _ in range(2):
        admit(alone, copy)
    with pytest.raises(TooManyRequestsError):
        admit(alone, copy)


def test_clients_have_limits_of_their_own(world: World) -> None:
    limits = {"client": {"per_s": 2, "burst": 3}, "by_subject": {"vip": {"per_s": 2, "burst": 9}}}
    guard = world.guard(limits=limits)
    ann, bob, vip = (
        bearer(world.signer.token("infer:m", sub=name)) for name in ("ann", "bob", "vip")
    )
    for _ in range(3):
        admit(guard, ann)
    with pytest.raises(TooManyRequestsError) as found:
        admit(guard, ann)
    assert found.value.retry_after_s == pytest.approx(0.5)
    admit(guard, bob)
    for _ in range(9):
        admit(guard, vip)
    world.now += 0.5
    admit(guard, ann)


def test_guesses_spend_the_limit_of_their_address_and_keep_nobody_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _ = create_key(world.folder / "api.json", "k", ("infer:m",))
    monkeypatch.setattr("serving.security.guard.FAILURES", Rate(per_s=1, burst=3))
    guard = world.guard(api_keys=str(world.folder / "api.json"))
    forged = Signer(ISSUER)
    for number in range(3):
        refused(guard, forged.token("infer:m", jti=str(number)))
    for number in range(50):
        for guess in (
            bearer(forged.token("infer:m", jti=f"more{number}")),
            api_key(f"falaj_{number:012x}_" + "A" * 43),
        ):
            with pytest.raises(TooManyRequestsError) as found:
                admit(guard, guess)
            assert found.value.retry_after_s == pytest.approx(1)
        newcomer = bearer(world.signer.token("infer:m", sub=f"new{number}"))
        assert admit(guard, newcomer).subject == f"new{number}"
    assert admit(guard, api_key(key)).subject == "k"
    # Who has to renew a token hears that, and not to come again with it.
    assert "expired" in refused(guard, world.signer.token("infer:m", exp=1_600_000_000))
    world.now += 1
    refused(guard, forged.token("infer:m", jti="later"))


def test_what_is_remembered_is_bounded_and_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.security.guard.MOST_KNOWN", 5)
    guard = world.guard()
    tokens = [world.signer.token("infer:m", sub=f"s{number}") for number in range(20)]
    for token in tokens:
        admit(guard, bearer(token))
    assert len(guard._known) == 5
    assert len(guard._requests._buckets) == 5
    assert not any(tokens[-1].encode() in key for key in guard._known)


def test_a_token_is_refused_after_its_end_though_it_was_remembered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.security.tokens.LEEWAY_S", 0)
    guard = world.guard()
    end = int(datetime.now(UTC).timestamp()) + 3
    token = world.signer.token("infer:m", exp=end)
    admit(guard, bearer(token))
    admit(guard, bearer(token))
    world.now += 4
    wait_until(lambda: datetime.now(UTC).timestamp() > end, "the token ended")
    assert "expired" in refused(guard, token)


# Whatever is presented, the guard answers with a principal or a refusal of its own.

SIGNER = Signer(ISSUER)
PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
CLAIMS = st.sampled_from(["iss", "aud", "exp", "nbf", "iat", "sub", "realm", "org", "jti"])


@pytest.fixture(scope="module")
def lenient(tmp_path_factory: pytest.TempPathFactory) -> SecurityGuard:
    world = World(tmp_path_factory.mktemp("guard"), SIGNER)
    api_keys = world.folder / "api.json"
    create_key(api_keys, "a", ("infer:m",))
    claims = {"roles_claim": "realm.roles", "tenant_claim": "org"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("serving.security.guard.FAILURES", Rate(per_s=1e9, burst=10**9))
        return world.guard(
            claims, api_keys=str(api_keys), certificates={"CN=batch": ["infer:m"]}, **BEHIND_EDGE
        )


def principal(guard: SecurityGuard, name: bytes, value: bytes) -> Principal | None:
    try:
        return admit(guard, [(name, value)])
    except ServingError:
        return None


@given(st.sampled_from([b"authorization", b"x-api-key", b"x-forwarded-client-cert"]), st.binary())
def test_bytes_are_refused(lenient: SecurityGuard, name: bytes, value: bytes) -> None:
    assert principal(lenient, name, value) is None
    assert principal(lenient, name, b"Bearer " + value) is None


@given(st.dictionaries(st.sampled_from(["alg", "kid", "typ", "crit", "jku", "jwk", "b64"]), PLAIN))
def test_any_header_of_a_token_is_refused(lenient: SecurityGuard, header: dict[str, Any]) -> None:
    claims = {"iss": ISSUER, "aud": AUDIENCE, "exp": 4_000_000_000, "sub": "a", "org": "b"}
    parts = [base64url_encode(json.dumps(part).encode()) for part in (header, claims)]
    assert principal(lenient, b"authorization", b"Bearer " + b".".join([*parts, b"AAAA"])) is None


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
    lenient: SecurityGuard, claims: dict[str, Any]
) -> None:
    usual = {"iss": ISSUER, "aud": AUDIENCE, "exp": 4_000_000_000, "sub": "a", "org": "b"}
    text = json.dumps(usual | claims).encode()
    token = jwt.api_jws.encode(text, SIGNER.key, algorithm="ES256", headers={"kid": "one"})
    found = principal(lenient, b"authorization", b"Bearer " + token.encode())
    assert found is None or (found.subject and found.tenant)


def test_deep_json_is_refused(lenient: SecurityGuard) -> None:
    deep = base64url_encode(b"[" * 3000 + b"]" * 3000)
    for parts in ((deep, deep), (base64url_encode(b'{"alg":"ES256"}'), deep)):
        assert principal(lenient, b"authorization", b"Bearer " + b".".join([*parts, b"AA"])) is None
