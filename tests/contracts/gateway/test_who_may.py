"""Tokens, keys and certificates at a real Envoy, with the guard of the server behind it."""

import itertools
import time

import httpx
import pytest

from serving.security.certificates import ensure_authority, ensure_certificate
from serving.security.keys import revoke_key
from tests.support.host.processes import wait_until
from tests.support.services.signing import forged_tokens
from tests.support.serving.edges import INFER, MODEL, OTHERS, Edge

REFUSED = (401, 403)


def ask(client: httpx.Client, headers: dict[str, str], path: str = INFER) -> httpx.Response:
    return client.post(path, json={}, headers=headers)


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_a_token_with_the_role_is_answered_by_stable(edge: Edge, client: httpx.Client) -> None:
    answer = ask(client, edge.bearer("ann"))
    assert answer.status_code == 200
    assert answer.json()["subject"] == "ann"
    assert answer.json()["slot"] == "stable"
    in_small_letters = {"authorization": edge.bearer("ann")["authorization"].replace("B", "b", 1)}
    assert ask(client, in_small_letters).json()["subject"] == "ann"


def test_who_presents_nothing_is_told_how_to(edge: Edge, client: httpx.Client) -> None:
    answer = ask(client, {})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.json()["error"]
    assert not edge.upstream.seen


@pytest.mark.parametrize(
    "claims",
    [
        {"exp": 1_700_000_000},
        {"exp": None},
        {"nbf": 4_000_000_000},
        {"aud": "another"},
        {"aud": None},
        {"iss": "https://somebody.test"},
        {"iss": None},
    ],
    ids=str,
)
def test_a_token_out_of_its_bounds_reaches_no_server(
    edge: Edge, client: httpx.Client, claims: dict[str, object]
) -> None:
    answer = ask(client, edge.bearer("eve", **claims))
    assert answer.status_code in REFUSED
    assert not edge.upstream.seen


def test_forged_tokens_reach_no_server(edge: Edge, client: httpx.Client) -> None:
    for token in forged_tokens(edge.signer, f"infer:{MODEL}"):
        assert ask(client, bearer(token)).status_code in REFUSED, token
    assert not edge.upstream.seen


def test_roles_are_by_model_and_action(edge: Edge, client: httpx.Client) -> None:
    assert ask(client, edge.bearer("r", "read:*")).status_code == 403
    assert ask(client, edge.bearer("r", f"infer:{OTHERS}")).status_code == 403
    assert client.get(f"/v2/models/{MODEL}", headers=edge.bearer("r", "read:*")).status_code == 200
    only_infer = edge.bearer("r", f"infer:{MODEL}")
    assert client.get(f"/v2/models/{MODEL}", headers=only_infer).status_code == 403


def test_a_tenants_token_is_refused_for_another_tenants_model(
    edge: Edge, client: httpx.Client
) -> None:
    path = f"/v2/models/{OTHERS}/infer"
    own = edge.tenants.token("infer:*", tenant="acme")
    other = edge.tenants.token("infer:*", tenant="globex")
    assert ask(client, bearer(own), path).status_code == 200
    assert ask(client, bearer(other), path).status_code == 403
    assert ask(client, bearer(other)).status_code == 200  # shared
    assert ask(client, bearer(edge.tenants.token("infer:*"))).status_code in REFUSED  # of nobody
    swapped = edge.tenants.token("infer:*", tenant="acme", iss=edge.signer.issuer)
    assert ask(client, bearer(swapped), path).status_code in REFUSED


def test_rotated_keys_are_taken_and_old_ones_refused(edge: Edge, client: httpx.Client) -> None:
    numbers = itertools.count()
    old = edge.bearer("old")
    assert ask(client, old).status_code == 200
    edge.signer.rotate("two")
    wait_until(
        lambda: ask(client, edge.bearer(f"rotated-{next(numbers)}")).status_code == 200,
        "the new key is taken",
    )
    wait_until(lambda: ask(client, old).status_code in REFUSED, "the old key is refused")


def test_api_keys_let_in_until_they_are_revoked(edge: Edge, client: httpx.Client) -> None:
    key, name = edge.key("nightly")
    headers = {"x-api-key": key}
    wait_until(lambda: ask(client, headers).status_code == 200, "the new key is known")
    assert ask(client, headers).json()["subject"] == "nightly"
    assert ask(client, headers, f"/v2/models/{OTHERS}/infer").status_code == 403
    assert ask(client, {"x-api-key": key[:-1] + "~"}).status_code == 401
    assert ask(client, headers | bearer("a.b.c")).status_code == 401
    revoke_key(edge.api_keys, name)
    wait_until(lambda: ask(client, headers).status_code == 401, "the revoked key is refused")


def test_a_certificate_names_a_client_and_a_header_does_not(
    edge: Edge, client: httpx.Client
) -> None:
    with edge.client(edge.client_certificate) as certified:
        answer = ask(certified, {})
        assert answer.status_code == 200
        assert answer.json()["subject"] == "CN=batch"
    claimed = {"x-forwarded-client-cert": 'Hash=00;Subject="CN=batch"'}
    assert ask(client, claimed).status_code == 401


def test_a_certificate_of_another_authority_opens_no_connection(edge: Edge) -> None:
    folder = edge.home.parent / "strangers"
    authority = ensure_authority(folder, "strangers")
    stranger = ensure_certificate(folder, "batch", authority, ["batch"], "client")
    with edge.client(stranger) as refused, pytest.raises(httpx.TransportError):
        ask(refused, {})


def test_each_client_has_a_limit_of_its_own(edge: Edge, client: httpx.Client) -> None:
    greedy, modest = edge.bearer("greedy"), edge.bearer("modest")
    started = time.monotonic()
    statuses: list[int] = []
    while 429 not in statuses:
        answer = ask(client, greedy)
        statuses.append(answer.status_code)
        assert len(statuses) <= edge.plan.config.limit.burst + 2 + time.monotonic() - started
    assert answer.headers["retry-after"] == "1"
    assert ask(client, modest).status_code == 200
