"""The table of roles, and what it decides about each page of the servers behind the authorizer."""

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.governance.access import Asked, access_table
from tasks.governance.identity import ROLES, SignIn, Subject
from tasks.kernel.settings import PROJECT_ROOT

ACTIONS = {
    "viewer": {"read"},
    "operator": {"read", "operate", "features"},
    "approver": {"read", "approve"},
    "auditor": {"read", "audit"},
    "admin": {"read", "operate", "features", "administer", "audit"},
}
"""Written once more by hand: who changes the table is to say so here too."""
CONFIG = SignIn.model_validate(
    {
        "issuer": "https://issuer.test",
        "client_id": "falaj",
        "client_secret": "secret",
        "owners": {"churn": "acme"},
    }
)
TABLE = access_table()
methods = st.sampled_from(["POST", "DELETE", "TRACE"])
roles = st.sets(st.sampled_from([*ROLES, "reader", "infer:*", ""]))
tenants = st.sampled_from(["falaj", "acme", "globex"])
use_cases = st.sampled_from([None, "flights", "churn"])


def test_roles_have_the_actions_that_were_meant() -> None:
    assert TABLE.roles == ACTIONS
    assert tuple(TABLE.roles) == ROLES


@given(roles, tenants, st.sets(st.sampled_from(["*", "flights", "churn"])), use_cases)
def test_only_role_and_tenant_and_use_case_together_open(
    held: set[str], tenant: str, granted: set[str], use_case: str | None
) -> None:
    subject = Subject("ana", tenant, tuple(held), tuple(granted))
    for action in set().union(*ACTIONS.values()):
        is_open = (
            any(action in ACTIONS.get(role, ()) for role in held)
            and tenant == ("acme" if use_case == "churn" else "falaj")
            and ("*" in granted or use_case in granted)
        )
        asked = Asked("prefect", action, use_case)  # type: ignore[arg-type]
        assert (TABLE.refusal(subject, asked, CONFIG) == "") is is_open


@given(st.text(alphabet="/abpi._-%2e?\\", max_size=30), methods)
def test_unknown_paths_are_refused_to_everybody(path: str, method: str) -> None:
    everything = Subject("root", "falaj", ROLES, ("*",))
    assert TABLE.asked(method, f"/api/x{path}") is None
    assert TABLE.refusal(everything, TABLE.asked(method, path), CONFIG)


@pytest.mark.parametrize(
    "path",
    [
        "/api/flow_runs/a/%72esume",
        "/api/flow_runs/a/b/resume",
        "/api//flow_runs/a/resume",
        "/API/flow_runs/a/resume",
        "/%61pi/flow_runs/a/resume",
        "/api/flow_runs/a/resume\n",
        "/api/flow_runs/a/resume/",
    ],
)
def test_a_disguised_path_fits_no_row(path: str) -> None:
    assert TABLE.asked("POST", path) is None


def _prefect() -> Iterator[tuple[str, str]]:
    from prefect.server.api.server import create_api_app

    for path, methods in create_api_app().openapi()["paths"].items():
        yield from ((method.upper(), f"/api{path}") for method in methods)


def test_each_call_of_prefect_has_the_action_of_its_effect() -> None:
    """By rules of this test's own: names that only look, and what runs and workers need."""
    looks = re.compile(
        r".*(/filter|/count|/history|/lateness|/paginate|count-by.*|status|/validate)"
    )
    runs = re.compile(
        r"/api/(flow_runs|task_runs)/(|.*(set_state|input|labels)|\{id\})|.*/create_flow_run(/bulk)?|"
        r"/api/(logs|artifacts|flows)/|/api/events|.*(crement|with-lease|renew|heartbeat)|"
        r".*_deployment|.*/schedule|/api/work_pools/.*/get_scheduled_flow_runs"
    )
    for method, path in _prefect():
        found = TABLE.asked(method, re.sub(r"\{[^}]+\}", "x", path))
        assert found is not None, (method, path)
        if "block_document" in path or path.startswith(("/api/admin/s",)):
            wanted = "administer"
        elif method == "GET" or looks.fullmatch(path) or path.startswith("/api/ui/"):
            wanted = "read"
        elif path.endswith("/resume"):
            wanted = "approve"
        elif path == "/api/deployments/get_scheduled_flow_runs":
            wanted = "read"
        elif method in ("POST", "PATCH") and runs.fullmatch(path):
            wanted = "operate"
        else:
            wanted = "administer"
        assert found.action == wanted, (method, path)


def test_nothing_is_written_to_mlflow_through_the_authorizer() -> None:
    """A tag would forge a person's consent; reads by POST are all that is let through."""
    from mlflow.server import app

    looks = re.compile(r".*/(search|search-datasets|get-latest-versions)|/graphql")
    for rule in app.url_map.iter_rules():
        path = "/mlflow" + re.sub(r"<[^>]+>", "x", rule.rule)
        for method in set(rule.methods or ()) - {"GET", "HEAD", "OPTIONS"}:
            found = TABLE.asked(method, path)
            assert found is None or looks.fullmatch(rule.rule), (method, path)
            assert found is None or found.action == "read"


def test_the_page_shows_the_table() -> None:
    text = (PROJECT_ROOT / "docs" / "explanation" / "security.md").read_text()
    head, _, *rows = [line for line in text.splitlines() if line.startswith("|")][:7]
    actions = [word.strip() for word in head.split("|")[2:-1]]
    for row in rows:
        role, *cells = (word.strip() for word in row.split("|")[1:-1])
        assert {a for a, cell in zip(actions, cells, strict=True) if cell == "yes"} == ACTIONS[role]
