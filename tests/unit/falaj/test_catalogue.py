"""The catalogue of an installation with tenants: one that shares, one whose state is damaged."""

import json
import re
from collections.abc import Callable
from datetime import UTC, date, datetime
from html import escape
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from falaj.__main__ import main
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureRefresh, ValidationResult
from tasks.features.access.store import apply_definitions, open_store
from tasks.features.declared.columns import read_features
from tasks.features.tables.build import EMPTY, build_feature_tables, publish_tables
from tasks.features.tables.landing import land_raw_rows
from tasks.governance.grants import Grant, change_grant
from tasks.governance.journal import Journal
from tasks.kernel.settings import Settings
from tasks.kernel.tenants import Tenant, put_tenant
from tasks.lineage import journal as lineage
from tasks.lineage.events import FlowRun
from tasks.lineage.steps import refresh_steps
from tests.support.data.declared import CUSTOMERS, FEATURES, ORDERS, write_rows, write_use_case
from tests.support.data.repository import vouched, vouchers

WINDOW = TimeWindow(start=datetime(2024, 1, 1, tzinfo=UTC), end=datetime(2024, 3, 1, tzinfo=UTC))
NOW = datetime.now(UTC)
Run = Callable[..., tuple[int, Any]]
CONTACT = "Red & <b>Co</b>"


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tenant red has a refreshed use case, blue a registry that is none, green nothing."""
    folder = tmp_path_factory.mktemp("installation")
    home, project = folder / "home", folder / "project"
    red = put_tenant(home, "red", Tenant(contact=CONTACT))
    blue = put_tenant(home, "blue", Tenant(contact="blue@example.org"))
    personal = {"data_class": "personal", "home": ["uae"], "purposes": ["returns"]}
    declared = {**FEATURES, "raw_tables": [{**ORDERS, **personal}, CUSTOMERS], "purpose": "returns"}
    write_rows(write_use_case(project, features=declared))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALAJ_ZONE", "uae")  # where data of that home may be
        refresh(Settings(red, project))
    given = {"use_case": "mail-order", "view": "habits", "since": NOW, "by": "ana"}
    for to, until in (("blue", None), ("green", date(2026, 1, 1))):
        change_grant(red, "mail-order", "habits", to, Grant(**given, to=to, until=until))
    who, subject = {"use_case": "<i>churn"}, {"view": "mail-order/habits", "to": "blue"}
    for outcome in ("ok", "refused"):
        Journal(red / "audit").append("read-view", outcome=outcome, who=who, subject=subject)
    broken = blue / "use_cases" / "churn" / "feast"
    broken.mkdir(parents=True)
    (broken / "applied.json").write_text('{"project": "churn"}')
    (broken / "registry.db").write_text("no database" * 1000)
    return home


def refresh(settings: Settings) -> None:
    """As the flow does it, but for what is online."""
    repo, home, store = settings.feature_repo, settings.features_home, settings.store
    config = read_features(repo)[1]
    landed = vouched(land_raw_rows(WINDOW, config, repo, store))
    tables = build_feature_tables(landed, EMPTY, config, repo, store)
    warned = {"num_expectations": 3, "warnings": ("one is broken",)}
    checked = tuple(each.model_copy(update=warned) for each in vouchers(tables.tables))
    for each in checked:
        store.build_once("validations", each.subject, ValidationResult, lambda _, each=each: each)
    publish_tables(tables, checked, home, store)
    apply_definitions(open_store(home, repo))
    done = FeatureRefresh(window=WINDOW, rows=landed, tables=tables, validations=checked, views=())
    steps, flow = refresh_steps(done, {}), FlowRun(str(uuid4()), "feature_refresh")
    lineage.Journal(settings.home / "lineage").record_steps(steps, flow, NOW, "abc")


@pytest.fixture
def shown(
    installation: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Exit code of the command, and what it prints as JSON."""

    def run(*words: str, tenant: str = "") -> tuple[int, Any]:
        monkeypatch.setenv("FALAJ_HOME", str(installation))
        monkeypatch.setenv("FALAJ_TENANT", tenant)
        code = main(["catalogue", *words, "--json"])
        return code, json.loads(capsys.readouterr().out)["use_cases"]

    return run


def test_all_tenants_are_read_or_named(shown: Run, installation: Path) -> None:
    code, found = shown()
    named = [(e["tenant"], e["use_case"]) for e in found]
    assert (code, named) == (1, [("red", "mail-order"), ("blue", "churn"), ("installation", "")])
    assert ["registry" in e["trouble"] for e in found] == [False, True, False]
    page = (installation / "catalogue" / "index.html").read_text()
    for text in (CONTACT, "<i>churn", "blue@example.org", "2 of 3 hold", "personal of uae"):
        assert escape(text) in page
    assert not re.search(r"<[bi]>|\bNizwa\b|\bc07\b", page)  # not escaped, or of a row


def test_a_view_has_owner_data_freshness_quality_and_grants(shown: Run, installation: Path) -> None:
    code, (entry,) = shown("--dry-run", tenant="red")
    customers, habits = entry["views"]
    assert (code, entry["contact"], habits["name"]) == (0, CONTACT, "habits")
    assert (habits["entities"], habits["features"]["amount_mean_7d"]) == (["customer"], "float")
    assert (habits["handling"]["data_class"], habits["handling"]["homes"]) == ("personal", ["uae"])
    assert habits["sources"] == ["customers", "orders"]
    assert habits["newest_event"].startswith("2024-02-29")
    assert datetime.fromisoformat(habits["published"]) >= NOW
    assert (habits["quality"]["expectations"], habits["quality"]["held"]) == (3, 2)
    assert [grant["to"] for grant in habits["grants"]] == ["blue"]  # the other one has ended
    assert [(r["to"], r["use_case"]) for r in habits["readers"]] == [("blue", "<i>churn")]
    assert customers["grants"] == customers["readers"] == []
    assert not (installation / "tenants" / "red" / "catalogue").exists()


def test_who_is_not_signed_in_sees_that_there_is_something(shown: Run, installation: Path) -> None:
    file = installation / "sign-in.yaml"
    file.write_text("{issuer: 'https://issuer.test', client_id: f, client_secret: s}")
    code, (entry,) = shown("--dry-run", tenant="red")
    file.unlink()
    assert (code, entry["views"], "no token" in entry["trouble"]) == (1, [], True)
