"""Tenants of an installation: which folder is whose, and what leads from one into another."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from falaj.__main__ import main
from tasks.contracts.base import TimeWindow
from tasks.features.access.profile import read_profile
from tasks.features.tables.raw_files import undeclared
from tasks.features.tables.sources import open_source
from tasks.kernel.errors import AccessError, ConfigurationError
from tasks.kernel.keys.address import check_keys, named_keys
from tasks.kernel.settings import DEFAULT_FEATURE_REPO, PROJECT_ROOT, Settings
from tasks.kernel.tenants import Tenant, own_tenant, put_tenant, read_tenants
from tasks.metadata.identity import state_identity
from tasks.state.contents import contents

BAO = "https://keys.test:8200"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The state folder of an installation with two tenants."""
    for name in ("red", "blue"):
        put_tenant(tmp_path, name, Tenant(cores=2))
    return tmp_path


def settings_of(tenant: str, home: Path, **variables: str) -> Settings:
    return Settings.from_environment({"FALAJ_HOME": str(home), "FALAJ_TENANT": tenant, **variables})


def test_a_tenant_has_a_state_folder_of_its_own_and_devices_are_shared(home: Path) -> None:
    red, own = settings_of("red", home), settings_of("", home)
    assert (red.home, own.home) == (home / "tenants" / "red", home)
    assert red.leases_path == own.leases_path
    assert red.home.stat().st_mode & 0o777 == red.home.parent.stat().st_mode & 0o777 == 0o700
    assert settings_of("red", red.home) == red
    assert (own_tenant(red.home), own_tenant(home)) == (Tenant(cores=2), Tenant())


@pytest.mark.parametrize("name", ["green", "../blue", "RED", "red ", ".", "a--b", "a" * 41])
def test_a_name_that_is_no_tenants_leads_nowhere(home: Path, name: str) -> None:
    for tenant, folder in ((name, home), ("red", home / "tenants" / "blue")):
        with pytest.raises(ConfigurationError, match="no tenant"):
            settings_of(tenant, folder)
    with pytest.raises(ConfigurationError):
        put_tenant(home / "tenants" / "red", name, Tenant())


@pytest.mark.parametrize("text", ["[red]", "red: {cores: 0}", "red: false", "../blue: {}", "{"])
def test_a_list_that_says_what_cannot_be_opens_nothing(home: Path, text: str) -> None:
    (home / "tenants.yaml").write_text(text)
    for read in (lambda: settings_of("red", home), lambda: own_tenant(home / "tenants" / "red")):
        with pytest.raises(ConfigurationError):
            read()


def test_a_folder_that_is_gone_or_not_listed_is_nobodys_state(home: Path) -> None:
    (home / "tenants" / "red").rmdir()
    with pytest.raises(ConfigurationError, match="is gone"):
        settings_of("red", home)
    (home / "tenants" / "zed").mkdir()
    with pytest.raises(ConfigurationError, match="no tenant 'zed'"):
        settings_of("", home / "tenants" / "zed")
    (home / "tenants.yaml").write_text("")
    assert settings_of("", home).home == home


@pytest.mark.parametrize("own", ["", "tenants/red"])
def test_no_path_of_a_raw_table_leads_into_the_state_of_others(
    home: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_HOME", str(home / own))
    secret = home / "tenants" / "blue" / "rows.csv"
    secret.write_text("id,at\n1,2024-01-01\n")
    (linked := home / own / "data").mkdir()
    (linked / "link.csv").symlink_to(secret)
    (linked / "own.csv").write_text(secret.read_text())
    window = TimeWindow(
        start=datetime(2024, 1, 1, tzinfo=UTC), end=datetime(2024, 1, 2, tzinfo=UTC)
    )
    for uri in (str(secret), f"{secret.parent}/*.csv", "data/*.csv", f"file://{secret}"):
        with pytest.raises(AccessError, match="by a grant"):
            open_source(undeclared("rows", uri), home / own, window, home)
    assert open_source(undeclared("rows", "data/own.csv"), home / own, window, home)


def test_what_is_not_said_of_a_tenant_again_stays(home: Path) -> None:
    add = ["--home", str(home), "tenants", "add", "red"]
    assert main([*add, "--contact", "ana"]) == 0
    assert read_tenants(home)["red"] == Tenant(cores=2, contact="ana")
    for wrong in (["--cores", "1.5"], ["--gpus", "-1"], ["--contact", "a\nb"]):
        assert main([*add, *wrong]) == 2
    assert main([*add, "--cores", "all"]) == 0
    assert read_tenants(home)["red"] == Tenant(contact="ana")
    assert main(["--home", str(home / "tenants" / "red"), "tenants", "list"]) == 2


def test_a_link_in_place_of_a_folder_leads_to_nobody(home: Path) -> None:
    put_tenant(home, "green", Tenant()).rmdir()
    (home / "tenants" / "green").symlink_to("blue")
    with pytest.raises(ConfigurationError, match="a link has no tenant"):
        settings_of("green", home)


@pytest.mark.parametrize(
    ("tenant", "place"), [("red", "tenants/blue/new"), ("red", "link"), ("", "tenants/blue")]
)
def test_no_location_lies_in_the_state_of_others(home: Path, tenant: str, place: str) -> None:
    (home / "link").symlink_to(home / "tenants" / "blue")
    with pytest.raises(ConfigurationError, match="with the state of others"):
        state_identity(settings_of(tenant, home, FALAJ_STATE=(home / place).as_uri()))
    assert not [*home.rglob("identity")]


@pytest.mark.parametrize("address", [BAO, f"{BAO}/transit-blue?x=/red", "file:///keys"])
def test_keys_are_of_one_tenant(home: Path, address: str) -> None:
    red = home / "tenants" / "red"
    with pytest.raises(ConfigurationError, match="transit-red"):
        named_keys(red, {"FALAJ_KEYS": address})
    for good in (f"{BAO}/transit-red", "file:///keys/red/"):
        check_keys(red, good)
    (red / "openbao").mkdir()
    own = f'{{"FALAJ_KEYS": "{BAO}", "FALAJ_KEYS_TOKEN_FILE": "/token"}}'
    (red / "openbao" / "client.json").write_text(own)
    assert named_keys(red, {}) is not None  # its own platform's


def test_features_of_one_name_are_apart_in_a_registry_that_is_shared(home: Path) -> None:
    folders = (home, home / "tenants/red", home / "tenants/blue/use_cases/flights")
    repo = PROJECT_ROOT / DEFAULT_FEATURE_REPO
    names = [read_profile(folder, repo)["project"] for folder in folders]
    assert names == ["flights", "flights__red", "flights__blue"]


def test_a_backup_of_the_installation_holds_nothing_of_tenants(home: Path) -> None:
    for folder in (home, home / "tenants" / "red"):
        (folder / "reports" / "one").mkdir(parents=True)
        (folder / "reports" / "one" / "page.html").touch()
    names = [name for wanted in range(9) for name, _ in contents(settings_of("", home), wanted)]
    assert [n for n in names if "page" in n or "tenants/" in n] == ["reports/one/page.html"]
