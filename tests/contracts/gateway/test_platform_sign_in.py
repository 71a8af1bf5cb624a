"""The platform's authorizer with real servers behind it: who passes, by role, action and tenant.

Real are Envoy, the authorizer, Prefect, MLflow, the serving process and the issuer's HTTP; the
feature server is a stand-in, which answers whatever reaches it.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from infra.platform.openbao import set_up
from serving.security.certificates import ensure_authority, ensure_certificate
from tasks.governance.identity import switch
from tests.support.host.processes import wait_until
from tests.support.services.openbao import CALLBACK, RunningOpenBao
from tests.support.services.sign_in import CLIENT, Gate, provider, running_gate
from tests.support.services.signing import forged_tokens

ALL = ("viewer", "operator", "approver", "auditor", "admin")
WORKS, RULES = ("operator", "admin"), ("admin",)
SOME = uuid4()
REQUESTS = [
    ("GET", "/", ALL, None),
    ("GET", "/dashboard", ALL, None),
    ("GET", "/api/admin/version", ALL, None),
    ("POST", "/api/flow_runs/filter", ALL, None),
    ("POST", f"/api/flow_runs/{SOME}/resume", ("approver",), None),
    ("POST", f"/api/deployments/{SOME}/create_flow_run", WORKS, None),
    ("POST", f"/api/flow_runs/{SOME}/set_state", WORKS, None),
    ("PATCH", f"/api/deployments/{SOME}", RULES, None),
    ("DELETE", "/api/work_pools/none", RULES, None),
    ("GET", f"/api/block_documents/{SOME}", RULES, None),
    ("GET", "/api/admin/settings", RULES, None),
    ("GET", "/mlflow/", ALL, None),
    ("GET", "/mlflow/api/2.0/mlflow/experiments/search?max_results=1", ALL, None),
    ("POST", "/mlflow/api/2.0/mlflow/registered-models/alias", (), None),
    ("POST", "/mlflow/api/2.0/mlflow/runs/create", (), None),
    ("GET", "/reports/", ALL, None),
    ("GET", "/reports/catalogue/", ALL, None),
    ("GET", "/reports/one/index.html", ALL, "flights"),
    ("GET", "/use_cases/churn/reports/one/index.html", ALL, "churn"),
    ("GET", "/features/flights/health", ALL, "flights"),
    ("POST", "/features/flights/get-online-features", WORKS, "flights"),
    ("POST", "/features/churn/get-online-features", WORKS, "churn"),
    ("POST", "/features/churn/push", WORKS, "churn"),
    ("GET", "/serving/status.json", ALL, None),
    ("POST", "/serving/admin/models/none/slots", RULES, None),
    ("GET", "/sign-in/whoami", ALL, "*"),
    ("GET", "/nothing/here", (), None),
]
"""Method, path, roles that may, and the use case it is of (None: of the installation)."""
PEOPLE = [("falaj", ["*"]), ("falaj", ["flights"]), ("acme", ["*"]), ("globex", "churn flights")]
CLOSED = (401, 403)
NO_OPERATION = f"/api/deployments/{SOME}/create_flow_run"


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    program = {"tenant": "falaj", "roles": ["operator"]}
    settings = {"owners": {"churn": "acme"}, "programs": {"CN=batch": program}, "keys_kept_s": 1}
    with running_gate(tmp_path_factory.mktemp("gate"), **settings) as gate:
        yield gate


@pytest.fixture
def client(gate: Gate) -> Iterator[httpx.Client]:
    with gate.client() as client:
        yield client


def test_nothing_but_its_cell_opens(gate: Gate, client: httpx.Client) -> None:
    """Each role, and none, of each tenant, at each class of pages of each server."""
    cells, wrong = 0, []
    for role in (*ALL, "reader"):
        for tenant, use_cases in PEOPLE:
            shown = gate.bearer(role, sub=role, tenant=tenant, use_cases=use_cases)
            for method, path, roles, use_case in REQUESTS:
                is_ours = tenant == ("acme" if use_case == "churn" else "falaj")
                is_named = "*" in use_cases or str(use_case) in use_cases
                is_open = role in roles and (use_case == "*" or (is_ours and is_named))
                status = client.request(method, path, headers=shown).status_code
                cells += 1
                if (status in CLOSED) is is_open or status == 503:
                    wrong.append((role, tenant, use_cases, method, path, status))
    assert not wrong
    assert cells >= 400


def test_who_shows_no_good_token_is_refused_and_noted(gate: Gate, client: httpx.Client) -> None:
    gate.passed.clear()
    other = gate.issuer.token("admin", aud="another")
    old = gate.issuer.token("admin", exp=int(time.time()) - 60)
    tokens = [*forged_tokens(gate.issuer, "admin"), other, old]
    tokens += [gate.issuer.token("admin", iss="https://other.test")]
    for token in tokens:
        for path in ("/features/flights/health", "/api/admin/version"):
            answer = client.get(path, headers={"authorization": f"Bearer {token}"})
            assert answer.status_code in CLOSED, token
    assert client.get("/features/flights/health").status_code in CLOSED
    claims = {"x-falaj-claims": gate.issuer.token("admin").split(".")[1]}
    assert client.get("/features/flights/health", headers=claims).status_code in CLOSED
    assert not gate.passed
    assert any(line["who"]["subject"] is None for line in gate.journal("refuse"))


def test_at_each_tenants_gateway_its_own_tokens_and_sessions_alone_open(tmp_path: Path) -> None:
    paths = [(m, p) for m, p, roles, _ in REQUESTS if "admin" in roles and "whoami" not in p][::4]
    with ExitStack() as stack:
        issuer = stack.enter_context(provider())
        gate_of = partial(running_gate, tmp_path, servers=False)
        gates = [stack.enter_context(gate_of(of=(name, issuer))) for name in ("red", "blue")]
        clients = [stack.enter_context(gate.client()) for gate in gates]
        for tenant in ("red", "blue", "falaj", "red ", None):
            shown = gates[0].bearer("admin", sub="rana", tenant=tenant)
            for gate, client in zip(gates, clients, strict=True):
                for method, path in paths:
                    status = client.request(method, path, headers=shown).status_code
                    assert (status not in CLOSED) == (tenant == gate.home.name), (tenant, path)
        issuer.person = {"sub": "rana", "roles": ["admin"], "tenant": "red"}
        browser = stack.enter_context(gates[0].client(follow_redirects=True))
        page = "/reports/one/index.html"
        assert browser.get(page, headers={"accept": "text/html"}).status_code == 200
        replayed = stack.enter_context(gates[1].client(cookies=dict(browser.cookies)))
        assert {replayed.get(each).status_code for each in (page, "/sign-in/whoami")} <= {*CLOSED}
        switch(gates[0].home, ["rana"], "rana", off=True)
        assert browser.get(page).status_code == 403


def test_an_account_is_switched_off_with_the_next_request(gate: Gate, client: httpx.Client) -> None:
    shown = gate.bearer("operator", sub="leaver")
    assert client.get("/features/flights/health", headers=shown).status_code == 200
    switch(gate.home, ["leaver"], "ana", off=True)
    refused = client.get("/features/flights/health", headers=shown)
    assert (refused.status_code, "switched off" in refused.text) == (403, True)
    switch(gate.home, ["leaver"], "ana", off=False)
    assert client.get("/features/flights/health", headers=shown).status_code == 200


def test_a_sign_in_that_is_too_old_ends_however_long_its_token_lasts(
    gate: Gate, client: httpx.Client
) -> None:
    long_ago = int(time.time()) - 9 * 3600
    for claims in ({"iat": long_ago}, {"auth_time": long_ago}, {"iat": None}):
        shown = gate.bearer("viewer", **claims)
        assert client.get("/features/flights/health", headers=shown).status_code == 401


def test_direct_ports_refuse_and_each_has_its_own_password(gate: Gate) -> None:
    platform = gate.home / "platform"
    first, second = ((platform / n).read_text().strip() for n in ("secret", "mlflow-secret"))
    for name, path in (("prefect", "/api/admin/version"), ("mlflow", "/")):
        others = second if name == "prefect" else first
        for auth in (None, tuple(others.split(":"))):
            answer = httpx.get(gate.direct[name] + path, auth=auth)  # type: ignore[arg-type]
            assert answer.status_code == 401, name
    assert httpx.get(f"{gate.direct['serving']}/status.json").status_code == 401


def test_a_browser_signs_in_by_a_code_and_out_again(gate: Gate) -> None:
    gate.issuer.person = {"sub": "ana \u0639\u0644\u064a", "roles": ["viewer"]}
    page = {"accept": "text/html"}
    with gate.client(follow_redirects=True) as browser:
        first = browser.get("/mlflow/", headers=page)
        assert (first.status_code, str(first.url)) == (200, f"{gate.address}/mlflow/")
        assert browser.get("/sign-in/whoami").text == "ana \u0639\u0644\u064a\n"
        assert browser.post(NO_OPERATION).status_code == 403
        token = browser.get("/sign-in/token").text.strip()
        cookies = dict(browser.cookies)
        assert token not in "".join(cookies.values())  # it is encrypted there
        browser.get("/sign-in/out", headers=page, follow_redirects=False)
        assert browser.get("/sign-in/whoami").status_code in CLOSED
    with gate.client(cookies=cookies | {"OauthExpires": "99999999999"}) as thief:
        assert thief.get("/sign-in/whoami").status_code in CLOSED
    entered = [line for line in gate.journal("sign-in") if line["who"]["subject"][:4] == "ana "]
    assert len(entered) == 1


def test_a_program_with_a_certificate_is_what_the_file_says(gate: Gate) -> None:
    authority = ensure_authority(gate.home.parent / "clients", "clients")
    for name, expected in (("batch", 200), ("unknown", 401)):
        folder = gate.home.parent / "clients"
        pair = ensure_certificate(folder, name, authority, [name], "client")
        with gate.client(pair) as program:
            assert program.get("/features/flights/health").status_code == expected
            said = {"x-forwarded-client-cert": 'Subject="CN=batch"'}
            assert program.get("/features/flights/health", headers=said).status_code == expected
            assert program.delete("/api/work_pools/none").status_code in CLOSED


def test_who_starts_a_run_and_who_answers_cannot_be_forged(
    gate: Gate, client: httpx.Client
) -> None:
    shown = gate.bearer("operator", sub="omar")
    flow = client.post("/api/flows/", json={"name": "answered"}, headers=shown).json()["id"]
    forged = {"prefect-automation-id": str(uuid4()), "prefect-automation-name": "YW5h"}
    made = client.post("/api/flow_runs/", json={"flow_id": flow}, headers=shown | forged).json()
    assert made["created_by"]["display_value"] == "omar"
    answer = {"run_input": {"decision": "approve", "approver": "somebody else"}}
    path = f"/api/flow_runs/{made['id']}/resume"
    client.post(path, json=answer, headers=gate.bearer("approver", sub="noor"))
    (line,) = [one for one in gate.journal("approve") if one.get("flow_run") == made["id"]]
    assert (line["who"]["subject"], line["said"]) == ("noor", "approve")


def test_keys_that_the_issuer_takes_back_count_no_more(gate: Gate, client: httpx.Client) -> None:
    old = gate.bearer("viewer")
    gate.issuer.rotate("two")

    def status(shown: dict[str, str]) -> int:
        return client.get("/features/flights/health", headers=shown).status_code

    wait_until(lambda: status(gate.bearer("viewer")) == 200, "the new key is taken")
    wait_until(lambda: status(old) == 401, "the old key is refused")


def test_people_of_openbao_sign_in_and_a_disabled_one_is_out_at_once(
    openbao: RunningOpenBao, tmp_path: Path
) -> None:
    """Some cells with accounts, tokens and the browser's flow of the issuer that Falaj carries."""
    (tmp_path / "secret").write_text(openbao.oidc["client_secret"])
    settings = {
        "issuer": openbao.oidc["issuer"],
        "client_id": openbao.oidc["client_id"],
        "client_secret": str(tmp_path / "secret"),
        "ca_file": str(openbao.files.authority.certificate),
        "scopes": ["openid", "falaj"],
        "name_claim": "username",
        "tenant": "red",
    }
    openbao.add("omar", "operator", use_cases="flights")
    openbao.add("noor", "viewer")
    openbao.add("zayd", "admin", tenant="blue")
    with running_gate(tmp_path, servers=False, **settings) as gate, gate.client() as client:
        for name, method, path, status in (
            ("omar", "POST", "/features/flights/push", 200),
            ("omar", "POST", "/features/churn/push", 403),
            ("omar", "POST", NO_OPERATION, 403),  # for one use case, not the installation
            ("noor", "POST", "/features/flights/push", 403),
            ("noor", "GET", "/reports/one/index.html", 200),
            ("zayd", "GET", "/features/flights/health", 403),
        ):
            shown = {"authorization": f"Bearer {openbao.tokens(name)['id_token']}"}
            assert client.request(method, path, headers=shown).status_code == status, (name, path)
        come_back = f"{gate.address}/sign-in/callback"
        set_up(openbao.files, openbao.url, [come_back, CALLBACK])
        with gate.client() as browser:
            page = browser.get("/reports/one/index.html", headers={"accept": "text/html"})
            asked = dict(httpx.URL(page.headers["location"]).params)
            path = openbao.oidc["issuer"].removeprefix(openbao.url) + "/authorize"
            told = {"X-Vault-Token": openbao.sign_in("noor")}
            code = openbao._ask("get", path, params=asked, headers=told)["code"]
            browser.get("/sign-in/callback", params={"code": code, "state": asked["state"]})
            assert browser.get("/sign-in/whoami").text == "noor\n"
            switch(gate.home, ["noor"], "zayd", off=True)
            assert browser.get("/sign-in/whoami").status_code == 403


def test_without_the_door_nothing_passes(gate: Gate, client: httpx.Client) -> None:
    shown = gate.bearer("admin", aud=CLIENT)
    gate.stop("authorizer")
    gate.passed.clear()
    for path in ("/features/flights/health", "/api/admin/version", "/mlflow/", "/reports/"):
        assert client.get(path, headers=shown).status_code == 503
    assert not gate.passed
    gate.start("authorizer")
    wait_until(
        lambda: client.get("/mlflow/", headers=shown).status_code == 200, "the authorizer is back"
    )
