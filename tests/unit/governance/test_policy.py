"""What may be placed where: by laws, by declared zones, by waivers, and closed where in doubt."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from falaj.__main__ import main
from flows.config import read_pipeline_config
from flows.stages import check_places
from tasks.contracts.hardware import CLASS_VARIABLE
from tasks.features.tables.raw_files import RawTable
from tasks.governance import policy, rego
from tasks.governance.handling import Declared, Handling, Placement
from tasks.governance.policy import Decision, Policies, known_handlings, require_placements
from tasks.kernel.errors import ConfigurationError, PlacementRefusedError
from tasks.kernel.settings import USE_CASE_FILE, Settings
from tasks.lineage.journal import LineageSettings
from tests.support.state import acts

TODAY = date(2026, 11, 27)
FLIGHTS = Path("feature_repo/flights")
UAE = Handling(data_class="personal", homes=("uae",), purposes=("service",), purpose="service")
ZONES = {
    "s3://lake/eu": "eu",
    "s3://lake": "uae",
    "*.example.ae": "uae",
    "pool:burst": "us",
    "/mnt/backups": "uae",
    "10.0.0.*": "uae",
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    for name in ("home", "project"):
        (tmp_path / name).mkdir()
    return Settings(tmp_path / "home", tmp_path / "project")


def written(settings: Settings, **said: Any) -> Policies:
    folder = settings.feature_repo / "policies"
    folder.mkdir(exist_ok=True)
    text = yaml.safe_dump({"own": "uae", "zones": ZONES, **said}, sort_keys=False)
    (folder / "policy.yaml").write_text(text)
    return Policies(settings, TODAY)


def decided(policies: Policies, where: str, handling: Handling = UAE) -> Decision:
    return policies.decide(Placement("model", where), handling)


def rules(decision: Decision, *, allow: bool = False) -> set[str]:
    return {reason.rule for reason in decision.reasons if reason.allow == allow}


@pytest.mark.parametrize(
    ("address", "zone"),
    [
        ("s3://lake/models", "uae"),
        ("s3://lake/eu/models", "eu"),  # the first pattern that fits
        ("s3://lake/europe", "uae"),  # a prefix ends at a slash
        ("s3://lake/eu/../models", "uae"),
        ("https://log.example.ae:8443/x?to=us", "uae"),
        ("https://LOG.EXAMPLE.AE.", "uae"),
        ("https://log.example.ae.evil.com/", "unknown"),
        ("https://log.example.ae@evil.com/", "unknown"),
        ("http://[::1]:4318/v1/traces", "uae"),
        ("http://[fe80::1/", "unknown"),
        ("0.0.0.0:8443", "unknown"),
        ("pool:burst", "us"),
        ("postgresql://u:p@10.0.0.1,10.0.0.2:5432/d", "uae"),
        ("postgresql+psycopg://u:p@10.0.0.1/d?host=db.evil.com", "unknown"),
        ("postgresql://10.0.0.1,evil.com/d", "uae, unknown"),
        ("db.example.ae:6379,ssl=true,password=evil.com", "uae"),
        ("ssl=true", "unknown"),
        ("mailtos://u:p@mail.example.ae:587?to=a@example.ae,b@evil.com", "uae, unknown"),
        ("mailto://mail.example.ae?TO=a@example.ae&cc=b@evil.com", "uae, unknown"),
        ("mailto://mail.example.ae/b@evil.com", "uae, unknown"),
        ("https://evil.com\\@log.example.ae/x", "unknown"),
        ("log.example.ae:80@evil.com", "unknown"),
        ("file:../../rows.csv", "unknown"),
        ("file:away/rows.csv", "unknown"),  # a link that leads out of the project
        ("/mnt/backups/falaj", "uae"),
        ("file:///mnt/backups2", "unknown"),
    ],
)
def test_the_zone_of_an_address_is_that_of_where_its_bytes_arrive(
    settings: Settings, address: str, zone: str
) -> None:
    (settings.feature_repo / "away").symlink_to("/usr/share")
    found = decided(written(settings, zones={**ZONES, "example.ae": "uae"}), address)
    assert ", ".join(sorted({*found.zone.split(", ")})) == zone
    assert found.allowed == ({*zone.split(", ")} == {"uae"})


def test_nothing_that_may_be_secret_is_shown(settings: Settings) -> None:
    policies = written(settings)
    for address in (
        "https://hooks.example.ae/services/secret?key=secret",
        "postgresql://secret:secret@10.0.0.1/d?password=secret",
        "db.example.ae:6379,password=secret",
        "mailtos://secret:secret@mail.example.ae",
    ):
        assert "secret" not in str(decided(policies, address))


def test_a_refusal_names_law_article_date_and_line(settings: Settings) -> None:
    found = decided(written(settings), "pool:burst")
    assert not found.allowed
    (reason,) = found.reasons
    assert (reason.law, reason.article) == ("UAE PDPL, Federal Decree-Law 45/2021", "22, 23")
    assert reason.as_of == TODAY
    file, _, line = reason.at.partition(":")
    text = (policy.SHIPPED.parent / file).read_text().splitlines()[int(line) - 1]
    assert f'"rule": "{reason.rule}"' in text
    for part in (reason.law, reason.article, "2026-11-27", reason.at, "for uae"):
        assert part in str(found)


def test_a_basis_on_file_allows_until_its_last_day(settings: Settings) -> None:
    basis = {"home": "uae", "zone": "us", "basis": "contract", "document": "DPA 7"}
    for until, allowed in ((TODAY, True), (date(2026, 11, 26), False)):
        found = decided(written(settings, bases=[{**basis, "until": until}]), "pool:burst")
        assert found.allowed is allowed
    other = written(settings, bases=[{**basis, "basis": "derogation", "until": TODAY}])
    assert not decided(other, "pool:burst").allowed


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({}, True),
        ({"until": date(2026, 11, 26)}, False),
        ({"approved_by": ["Amal"]}, False),
        ({"approved_by": ["Amal", " amal "]}, False),
        ({"approved_by": ["Amal", ""]}, False),
        ({"approved_by": ["Amal B", "Amal \u200b B", "\uff21mal B"]}, False),
        ({"what": "backup"}, False),
        ({"where": "pool:other"}, False),
        ({"rule": "gdpr-44"}, False),
    ],
)
def test_a_waiver_needs_an_end_two_people_and_the_very_rule(
    settings: Settings, change: dict[str, Any], allowed: bool
) -> None:
    waiver = {
        "rule": "pdpl-outside",
        "what": "model",
        "where": "pool:burst",
        "reason": "a trial without rows",
        "until": TODAY,
        "approved_by": ["Amal", "Badr"],
    }
    found = decided(written(settings, waivers=[{**waiver, **change}]), "pool:burst")
    assert found.allowed is allowed
    assert bool(found.notes) is not bool({*change} & {"what", "where", "rule"})
    if "until" in change:
        assert "it ended on 2026-11-26" in str(found)
    if "approved_by" in change:
        assert "two different people" in str(found)
    both = written(settings, waivers=[waiver])  # nobody waived the second rule
    away = UAE.model_copy(update={"purpose": "advertising"})
    assert not decided(both, "pool:burst", away).allowed


def engine_away(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    (settings.home / "regopy.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(settings.home))


HEAD = "package falaj.own\nimport rego.v1\n"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "package falaj.own\nanswer contains {",
        HEAD + 'answer contains {"allow": true, "home": "uae"} if true',
        HEAD + "answers := []",
        HEAD + "a := 1 if true\na := 2 if true\nanswer contains a",
        HEAD + 'answer contains 1 if to_number("x") == 1',
    ],
    ids=["away", "unread", "incomplete", "none", "contradictory", "failing"],
)
def test_without_an_answer_data_with_a_home_goes_nowhere(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    policies = written(settings)
    if text is None:
        engine_away(settings, monkeypatch)
    else:
        (settings.feature_repo / "policies" / "own.rego").write_text(text)
    policy._engine.cache_clear()
    with pytest.raises(PlacementRefusedError, match="Nothing was placed"):
        decided(policies, "127.0.0.1")
    assert decided(policies, "https://evil.com", Handling()).allowed


def test_a_policy_that_comes_to_no_end_is_stopped_and_named(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = "some a in numbers.range(1, 9000)\nsome b in numbers.range(1, 9000)\na * b < 0"
    policies = written(settings)
    file = settings.feature_repo / "policies" / "own.rego"
    file.write_text(f'{HEAD}answer contains 1 if {{\ninput.zone == "us"\n{far}\n}}')
    assert decided(policies, "127.0.0.1").allowed
    monkeypatch.setattr(rego, "ANSWERS_WITHIN_S", 1.0)
    with pytest.raises(PlacementRefusedError, match=r"^policies/own\.rego comes to no end"):
        decided(policies, "pool:burst")
    file.write_text(HEAD + "answer contains 1 if false")
    monkeypatch.undo()
    assert not decided(written(settings), "pool:burst").allowed


def test_of_data_without_a_home_nobody_is_asked(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_away(settings, monkeypatch)
    policy._engine.cache_clear()
    elsewhere = {"FALAJ_STATE": "s3://anywhere", "OPENLINEAGE_URL": "https://anywhere"}
    require_placements(settings, [Placement("model", "https://evil.com")], [Handling()], elsewhere)
    require_placements(settings, [Placement("model", "https://evil.com")], None, elsewhere)
    assert not (settings.home / "audit").exists()


def test_a_law_of_ones_own_is_added_and_a_shipped_one_replaced(settings: Settings) -> None:
    saudi = UAE.model_copy(update={"homes": ("sa",)})
    policies = written(settings)
    found = decided(policies, "s3://lake", saudi)
    assert (found.allowed, rules(found)) == (False, {"own-silence"})
    answer = '"law": "SA", "article": "29", "as_of": "2026-11-27", "says": "adequate"'
    (settings.feature_repo / "policies" / "sa.rego").write_text(
        "package falaj.sa\nimport rego.v1\n"
        f'answer contains {{"home": "sa", "allow": true, "rule": "sa-29", {answer}}} if '
        '{\n\t"sa" in input.homes\n\tinput.zone == "uae"\n}\n'
    )
    found = decided(written(settings), "s3://lake", saudi)
    assert found.allowed
    assert found.reasons[0].at == "policies/sa.rego:3"
    own = (policy.SHIPPED / "adequacy.yaml").read_text().replace("zones: []", "zones: [us]", 1)
    (settings.feature_repo / "policies" / "adequacy.yaml").write_text(own)
    assert rules(decided(written(settings), "pool:burst"), allow=True) == {"pdpl-22"}


def test_what_is_made_of_several_tables_has_the_strictest_class_and_all_homes() -> None:
    tables = [
        Declared(),
        Declared(data_class="sensitive", home=("eu",), purposes=("care", "research")),
        Declared(data_class="personal", home=("uae", "eu"), purposes=("care",)),
    ]
    found = Handling.of(tables, "care")
    assert (found.data_class, found.homes, found.purposes) == (
        "sensitive",
        ("eu", "uae"),
        ("care",),
    )
    assert found.tags["data_homes"] == "eu uae"
    assert Handling.of([Declared()], "").tags == {}
    with pytest.raises(ValueError, match="personal needs a home"):
        Declared(data_class="personal")
    assert RawTable.model_fields["home"].default == ()


def declared(settings: Settings, **said: Any) -> None:
    """The flights use case, whose first table is personal and at home in the UAE."""
    text = yaml.safe_load((FLIGHTS / USE_CASE_FILE).read_text())
    text["features"]["raw_tables"][0] |= {"data_class": "personal", "home": ["uae"]}
    text["features"]["raw_tables"][0] |= {"purposes": ["service"]}
    text["features"]["purpose"] = "service"
    for link in ("sql", "expectations"):
        (settings.feature_repo / link).symlink_to((FLIGHTS / link).resolve())
    (settings.feature_repo / USE_CASE_FILE).write_text(yaml.safe_dump(text | said))


@pytest.fixture
def installed(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    declared(settings)
    monkeypatch.setenv("FALAJ_HOME", str(settings.home))
    monkeypatch.setenv("FALAJ_FEATURE_REPO", str(settings.feature_repo))
    written(settings)
    return settings


def test_rows_that_were_landed_keep_their_handling_when_the_declaration_is_gone(
    installed: Settings,
) -> None:
    (known,) = known_handlings(installed)
    assert (known.data_class, known.homes) == ("personal", ("uae",))
    kept = installed.store.root / "landed" / "key" / "value.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps({"handling": UAE.model_dump(mode="json")}))
    (installed.feature_repo / USE_CASE_FILE).write_text("name: flights\n")
    assert known_handlings(installed) == (UAE,)
    (installed.feature_repo / USE_CASE_FILE).write_text("features: {raw_tables: [{home: 3}]}\n")
    with pytest.raises(ConfigurationError, match="as they cannot be"):
        known_handlings(installed)


def test_a_flow_asks_for_its_configuration_its_environment_and_its_own_pool(
    installed: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_pipeline_config(installed.feature_repo)
    check_places(config)
    with monkeypatch.context() as patch:
        patch.setenv(CLASS_VARIABLE, "burst")
        with pytest.raises(PlacementRefusedError, match="pool:burst"):
            check_places(config)
    uri = {"uri": "https://rows.example.com/flights.csv"}
    far = config.features.raw_tables[0].model_copy(update=uri)
    features = config.features.model_copy(update={"raw_tables": (far,)})
    with pytest.raises(PlacementRefusedError, match=r"by features\.raw_tables\.0\.uri"):
        check_places(config.model_copy(update={"features": features}))
    monkeypatch.setenv("FALAJ_FLIGHTS_URL", "postgresql://db.example.com/d")
    with pytest.raises(PlacementRefusedError, match="FALAJ_FLIGHTS_URL"):
        check_places(config)


def test_a_refusal_comes_before_the_first_byte_and_is_recorded(
    installed: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / "far"
    assert main(["backup", str(target)]) == 5
    assert not target.exists()
    (line,) = acts(installed.home, "place")
    assert (line["outcome"], line["subject"]["where"]) == ("refused", f"file://{target}")
    assert "own-unknown" in line["rules"]
    monkeypatch.setenv("OPENLINEAGE_URL", "https://lineage.example.com")
    with pytest.raises(PlacementRefusedError, match="to https://lineage"):
        LineageSettings.from_environment()


def test_where_the_state_may_not_be_not_even_the_journal_is_written(
    installed: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (far := tmp_path / "far").mkdir()
    monkeypatch.setenv("FALAJ_STATE", far.as_uri())
    assert main(["run"]) == 5
    assert [*far.iterdir()] == []


def test_policy_check_shows_each_placement_with_its_law_and_ends_with_5(
    installed: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policy", "check"]) == 0
    monkeypatch.setenv("FALAJ_NOTIFY_WEBHOOK", "https://hooks.example.com/x")
    assert main(["policy", "check", "--json"]) == 5
    facts = json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))
    refused = [each for each in facts["decisions"] if not each["allowed"]]
    assert [each["placement"]["setting"] for each in refused] == ["FALAJ_NOTIFY_WEBHOOK"]
    asked = ["policy", "check", "--explain", "--what", "model", "--where", "s3://lake/eu"]
    assert main(asked) == 5
    assert "UAE PDPL, Federal Decree-Law 45/2021, 22, 23" in capsys.readouterr().out
    assert main(["policy", "check", "--what", "model"]) == 2
    assert not (installed.home / "audit").exists()
