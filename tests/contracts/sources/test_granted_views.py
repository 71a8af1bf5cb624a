"""A feature view of one tenant as a raw table of another: by a signed grant, until revoked."""

import json
import os
import pwd
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from falaj.__main__ import main
from tasks.contracts.data import FeatureTables
from tasks.features.tables.build import EMPTY, build_feature_tables, current_tables, publish_tables
from tasks.features.tables.tenants import Reading, copy_granted, environment_of
from tasks.governance.grants import FILE, Grant, read_grants, shared_views
from tasks.kernel.errors import AccessError, ConfigurationError, SignatureError
from tasks.kernel.keys.files import FileKeys
from tasks.kernel.keys.signed import signed
from tasks.kernel.settings import Settings
from tasks.kernel.tenants import Tenant, put_tenant
from tests.support.data.repository import vouched, vouchers
from tests.support.services.raw_sources import SourceShop, month, seen
from tests.support.state import acts

URI = "tenant://red/shop/habits"
COLUMNS = {
    **{"customer": "VARCHAR", "event_timestamp": "TIMESTAMPTZ", "created": "TIMESTAMPTZ"},
    **{"orders_28d": "BIGINT", "items_28d": "DOUBLE", "price_of_an_item": "DOUBLE"},
}


class Team(SourceShop):
    """A shop in the state of a tenant."""

    def __init__(self, folder: Path, home: Path) -> None:
        super().__init__(folder)
        self.settings = Settings(home=home, feature_repo=self.repo)
        self.store = self.settings.store

    def publish(self, tables: FeatureTables | None = None) -> None:
        """Publish feature tables, by default those of all orders."""
        tables = tables or self.tables()
        publish_tables(tables, vouchers(tables.tables), self.settings.features_home, self.store)

    def acts(self, action: str) -> list[dict[str, Any]]:
        return acts(self.settings.home, action)


@pytest.fixture
def red(tmp_path: Path) -> Team:
    """The owner; its view is published."""
    team = Team(tmp_path / "red", put_tenant(tmp_path / "home", "red", Tenant()))
    team.publish()
    return team


@pytest.fixture
def blue(red: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Team:
    """The reader, with the view as its first raw table; this process is the reader's."""
    team = Team(tmp_path / "blue", put_tenant(tmp_path / "home", "blue", Tenant()))
    file = team.repo / "use_case.yaml"
    described = yaml.safe_load(file.read_text())
    time, raw = "event_timestamp", described["features"]["raw_tables"]
    table = {"name": "habits", "uri": URI, "time_column": time, "columns": COLUMNS}
    described["features"]["raw_tables"] = [{**table, "key": ["customer", time]}, *raw]
    file.write_text(yaml.safe_dump({**described, "name": "loyalty"}))
    monkeypatch.setenv("FALAJ_HOME", str(team.settings.home))
    return team


@pytest.fixture
def as_red(red: Team) -> Callable[..., int]:
    """A command of the owner's people."""
    place = ["--home", str(red.settings.home), "--project", str(red.repo)]

    def run(*words: str) -> int:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("FALAJ_HOME", "FALAJ_FEATURE_REPO"):
                patch.setenv(name, "")
            return main([*place, *words])

    return run


def test_a_granted_view_is_read_as_its_owner_has_it_until_that_is_revoked(
    red: Team, blue: Team, as_red: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert as_red("grants", "add", "habits", "--to", "blue", "--until", "2999-01-01") == 0
    monkeypatch.setenv("FALAJ_AUDIT", (heads := blue.repo / "heads").as_uri())
    monkeypatch.setenv("LOGNAME", "mallory")
    landed, own = blue.read(window=month(3)), current_tables(red.settings.features_home, red.store)
    rows = pd.read_parquet(red.store.path(own.tables[0].artifact))
    inside = rows[rows["event_timestamp"].between(month(3).start, month(3).end, inclusive="left")]
    key = ["event_timestamp", "customer"]
    expected, got = (
        each[list(COLUMNS)].sort_values(key, ignore_index=True)
        for each in (inside, blue.rows(landed))
    )
    assert len(got) > 50
    pd.testing.assert_frame_equal(got, expected, check_dtype=False)
    assert seen(landed).uri == f"{URI}@{own.version[:12]}"
    assert seen(blue.read(f"{URI}@{own.version[:12]}", month(3))) == seen(landed)
    with pytest.raises(ConfigurationError, match=f"of version {own.version[:12]}"):
        blue.read(f"{URI}@{'0' * 12}", month(3))
    assert not heads.exists()  # of the owner's journal none are shipped where the reader ships
    monkeypatch.delenv("FALAJ_AUDIT")
    blue.source(URI)
    features = blue.config.features
    (view,) = shared_views(table.uri for table in features.raw_tables)
    assert (view.owner, view.use_case, view.name) == ("red", "shop", "habits")
    kept = build_feature_tables(vouched(landed), EMPTY, features, blue.repo, blue.store)
    blue.publish(kept)

    assert as_red("grants", "revoke", "habits", "--to", "blue") == 0
    with pytest.raises(AccessError, match="ask who administers red"):
        blue.read(window=month(3))
    assert current_tables(blue.settings.features_home, blue.store) == kept
    assert len(blue.rows(landed)) == len(got)
    reads = red.acts("read-view")
    assert [act["outcome"] for act in reads] == ["ok", "ok", "refused", "refused"]
    assert (reads[0]["who"]["tenant"], reads[0]["who"]["use_case"]) == ("blue", "loyalty")
    assert {act["who"]["user"] for act in reads} == {pwd.getpwuid(os.getuid()).pw_name}
    assert reads[0]["rows"] >= len(got)
    assert reads[0]["window"]["start"] == "2024-04-01T00:00:00Z"
    assert [red.acts(each)[0]["outcome"] for each in ("grant", "revoke-grant")] == ["ok", "ok"]
    assert as_red("audit", "verify") == 0
    assert as_red("grants", "revoke", "habits", "--to", "blue") == 2


def refused(blue: Team, red: Team, uri: str = URI) -> str:
    """Why the owner's state gives nothing, as its journal says it too."""
    (table, *_), target = blue.config.features.raw_tables, blue.repo / "rows.parquet"
    declared = table.model_copy(update={"uri": uri}).model_dump()
    named = {"tenant": "blue", "use_case": "loyalty", "purpose": ""}
    with pytest.raises(AccessError) as caught:
        copy_granted(red.settings, Reading(table=declared, window=month(3), target=target, **named))
    line = red.acts("read-view")[-1]
    assert (line["outcome"], line["reason"]) == ("refused", str(caught.value))
    assert line["who"]["tenant"] == "blue"
    assert not target.exists()
    return str(caught.value)


def test_nothing_but_what_the_owner_signed_opens_a_view(
    red: Team, blue: Team, as_red: Callable[..., int], tmp_path: Path
) -> None:
    assert "does not let blue" in refused(blue, red)
    assert as_red("grants", "add", "habits", "--to", "installation") == 0
    assert "does not let blue" in refused(blue, red)
    (grant,) = read_grants(red.settings.home)
    assert (grant.use_case, grant.view, grant.to) == ("shop", "habits", "installation")
    file = red.settings.home / FILE
    text = file.read_text()

    def write(*grants: Grant, keys: Path = red.settings.home / "keyring") -> None:
        content = {"grants": [each.model_dump(mode="json") for each in grants]}
        file.write_text(signed(FileKeys(keys), content))

    wanted = grant.model_copy(update={"to": "blue"})
    file.write_text(text.replace("installation", "blue"))
    assert "do not count" in refused(blue, red)
    write(wanted, keys=blue.settings.home / "keyring")
    assert "do not count" in refused(blue, red)
    with pytest.raises(SignatureError):
        read_grants(red.settings.home)
    write(wanted.model_copy(update={"until": date(2026, 1, 31)}))
    assert "until 2026-01-31" in refused(blue, red)
    write(wanted.model_copy(update={"purpose": "advice"}))
    assert "for advice alone" in refused(blue, red)
    write(wanted)
    for other in ("shop/orders", "shop/customers", "flights/habits"):
        assert "does not let blue" in refused(blue, red, f"tenant://red/{other}")
    assert blue.read(URI, month(3)).tables[0].num_rows


def test_rows_keep_the_class_the_homes_and_the_purposes_of_their_owner(
    red: Team, blue: Team, as_red: Callable[..., int]
) -> None:
    care = {"data_class": "personal", "home": ["uae"], "purposes": ["advice"]}
    red.source("raw/orders.csv", **care)
    red.publish()
    assert as_red("grants", "add", "habits", "--to", "blue") == 0
    said = refused(blue, red)
    assert "data_class: personal, home: [uae], purposes: [advice] beside uri" in said
    blue.source(URI, **{**care, "purposes": ["advice", "advertising"]})
    assert refused(blue, red).endswith("write purposes: [advice] beside uri")
    blue.source(URI, **{**care, "home": ["uae", "eu"]})
    assert blue.read(window=month(3)).handling.homes == ("eu", "uae")


def test_the_owners_process_knows_who_reads_and_nothing_of_the_readers_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FALAJ_TOKEN_FILE", "FALAJ_STATE", "FALAJ_KEYS", "FALAJ_HOME"):
        monkeypatch.setenv(name, f"/reader/{name}")
    found = {n: v for n, v in environment_of(tmp_path).items() if n.startswith("FALAJ_")}
    assert found == {"FALAJ_TOKEN_FILE": "/reader/FALAJ_TOKEN_FILE", "FALAJ_HOME": str(tmp_path)}


@pytest.mark.parametrize("uri", ["red/habits", "red/shop/../habits", "/shop/x", "red/a/b?c=d"])
def test_an_address_that_names_no_view_is_refused_at_the_door(red: Team, uri: str) -> None:
    red.source(f"tenant://{uri}")
    with pytest.raises(ConfigurationError, match="names no feature view"):
        _ = red.config


def test_only_what_is_there_is_granted(
    red: Team, blue: Team, as_red: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ["habit", "--to", "blue"],
        ["habits", "--to", "green"],
        ["habits", "--to", "red"],
    ):
        assert as_red("grants", "add", *words) == 2
    assert as_red("grants", "add", "habits", "--to", "blue", "--until", "2020-01-01") == 2
    assert not (red.settings.home / FILE).exists()
    assert as_red("grants", "add", "habits", "--to", "blue", "--purpose", "advice") == 0
    capsys.readouterr()
    assert as_red("--json", "grants", "list") == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["to"], listed["purpose"], listed["until"]) == ("blue", "advice", None)
    for name in ("installation", "../red"):
        with pytest.raises(ConfigurationError):
            put_tenant(red.settings.home.parents[1], name, Tenant())
