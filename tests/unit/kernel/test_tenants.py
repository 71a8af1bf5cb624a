"""Tenants of an installation: which folder is whose, and what leads from one into another."""

from pathlib import Path

import pytest

from falaj.context import Context
from tasks.features.access.profile import read_profile
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.keys.address import check_keys, named_keys
from tasks.kernel.keys.files import FileKeys
from tasks.kernel.location import Location
from tasks.kernel.settings import DEFAULT_FEATURE_REPO, PROJECT_ROOT, Settings
from tasks.kernel.tenants import (
    Tenant,
    installation_of,
    own_tenant,
    put_tenant,
    read_tenants,
    tenant_of,
)
from tasks.metadata.identity import state_identity
from tasks.state.contents import contents


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of an installation with two tenants."""
    monkeypatch.setenv("FALAJ_HOME", str(home := tmp_path / "inst"))
    monkeypatch.setenv("FALAJ_FEATURE_REPO", str(PROJECT_ROOT / DEFAULT_FEATURE_REPO))
    put_tenant(home, "red", Tenant(cores=2, gpus=0))
    put_tenant(home, "blue", Tenant())
    return home


def settings_of(tenant: str, home: Path, **variables: str) -> Settings:
    return Settings.from_environment({"FALAJ_HOME": str(home), "FALAJ_TENANT": tenant, **variables})


def test_a_tenant_has_a_state_folder_of_its_own_and_devices_are_shared(home: Path) -> None:
    red, own = settings_of("red", home), settings_of("", home)
    assert (red.home, own.home) == (home / "tenants" / "red", home)
    assert (tenant_of(red.home), tenant_of(home)) == ("red", "")
    assert installation_of(red.home) == installation_of(home) == home
    assert red.leases_path == own.leases_path
    assert (red.metadata_url, red.mlflow_uri) != (own.metadata_url, own.mlflow_uri)
    assert red.home.stat().st_mode & 0o777 == red.home.parent.stat().st_mode & 0o777 == 0o700
    assert settings_of("red", red.home) == red
    assert own_tenant(red.home) == Tenant(cores=2, gpus=0)
    put_tenant(home, "red", Tenant(cores=3))
    assert own_tenant(red.home) == Tenant(cores=3)
    assert own_tenant(home) == Tenant()


@pytest.mark.parametrize("name", ["green", "../blue", "red/../blue", "RED", "red ", "."])
def test_a_name_that_is_no_tenants_leads_nowhere(home: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="no tenant"):
        settings_of(name, home)
    with pytest.raises(ConfigurationError, match="no tenant"):
        settings_of("red", home / "tenants" / "blue")


@pytest.mark.parametrize("name", ["", "Red", "a/b", "..", "a--b", "-a", "a-", "a_b", "a" * 41, "é"])
def test_a_name_that_names_no_folder_is_refused(home: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="is no tenant"):
        put_tenant(home, name, Tenant())
    assert {*read_tenants(home)} == {"blue", "red"}


@pytest.mark.parametrize(
    "text",
    ["[red]", "red: {cores: 0}", "red: {gpus: -1}", "red: {core: 1}", "red: false", "on: {}",
     "red: {}\nred: {}", "../blue: {}", "{"],
)  # fmt: skip
def test_a_list_that_says_what_cannot_be_opens_nothing(home: Path, text: str) -> None:
    (home / "tenants.yaml").write_text(text)
    with pytest.raises(ConfigurationError):
        settings_of("red", home)
    with pytest.raises(ConfigurationError):
        own_tenant(home / "tenants" / "red")


def test_a_link_in_place_of_a_folder_leads_to_nobody(home: Path, tmp_path: Path) -> None:
    for name, target in (("green", "blue"), ("grey", str(tmp_path / "elsewhere"))):
        put_tenant(home, name, Tenant()).rmdir()
        (home / "tenants" / name).symlink_to(target)
        with pytest.raises(ConfigurationError, match="a link has no tenant"):
            settings_of(name, home)


def test_a_tenant_has_no_tenants_and_one_that_is_struck_off_has_no_devices(home: Path) -> None:
    with pytest.raises(ConfigurationError, match="is the state of the tenant red"):
        put_tenant(home / "tenants" / "red", "green", Tenant())
    (home / "tenants.yaml").write_text("blue: {}\n")
    with pytest.raises(ConfigurationError, match="no tenant 'red'"):
        own_tenant(home / "tenants" / "red")


@pytest.mark.parametrize(
    ("tenant", "place"),
    [("red", "tenants/blue"), ("red", "tenants/blue/new"), ("red", "."), ("red", "link"),
     ("", "tenants/blue"), ("", "tenants")],
)  # fmt: skip
def test_no_location_lies_in_the_state_of_others(home: Path, tenant: str, place: str) -> None:
    (home.parent / "link").symlink_to(home / "tenants" / "blue")
    url = (home.parent if place == "link" else home).joinpath(place).as_uri()
    with pytest.raises(ConfigurationError, match="with the state of others"):
        state_identity(settings_of(tenant, home, FALAJ_STATE=url))
    assert not (home / "tenants" / "blue" / "identity").exists()


def test_a_command_reads_no_location_of_another_tenant(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_STATE", url := (tmp_path / "lake").as_uri())
    monkeypatch.setenv("FALAJ_TENANT", "red")
    assert Context().target.location == Location(url)
    for other in ("blue", ""):
        monkeypatch.setenv("FALAJ_TENANT", other)
        monkeypatch.setenv("FALAJ_HOME", str(home))
        with pytest.raises(ConfigurationError, match="holds the state of red"):
            Context().target  # noqa: B018


def test_keys_are_of_one_tenant(home: Path, tmp_path: Path) -> None:
    red = home / "tenants" / "red"
    bao = "https://keys.test:8200"
    for address in (bao, f"{bao}/transit", f"{bao}/transit-blue", f"{bao}/transit-red/x",
                    f"file://{tmp_path}", f"{bao}/transit-blue?x=/red"):  # fmt: skip
        with pytest.raises(ConfigurationError, match="transit-red"):
            check_keys(red, address)
        with pytest.raises(ConfigurationError, match="transit-red"):
            named_keys(red, {"FALAJ_KEYS": address})
    for address in (f"{bao}/transit-red", f"file://{tmp_path}/red/"):
        check_keys(red, address)
    assert isinstance(named_keys(red, {"FALAJ_KEYS": f"file://{tmp_path}/red"}), FileKeys)
    (red / "openbao").mkdir()
    own = f'{{"FALAJ_KEYS": "{bao}", "FALAJ_KEYS_TOKEN_FILE": "/token"}}'
    (red / "openbao" / "client.json").write_text(own)
    assert named_keys(red, {}) is not None  # its own platform's


def test_features_of_one_name_are_apart_in_a_registry_that_is_shared(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = Settings.from_environment().feature_repo
    names = [
        read_profile(folder, repo)["project"]
        for folder in (home, home / "tenants/red", home / "tenants/blue/use_cases/flights")
    ]
    assert names == ["flights", "flights__red", "flights__blue"]


def test_a_backup_of_the_installation_holds_nothing_of_tenants(home: Path) -> None:
    for folder in (home, home / "tenants" / "red"):
        (folder / "reports" / "one").mkdir(parents=True)
        (folder / "reports" / "one" / "page.html").touch()
    names = [name for wanted in range(9) for name, _ in contents(settings_of("", home), wanted)]
    assert {n for n in names if "page" in n} == {"reports/one/page.html"}
    assert not [name for name in names if name.startswith("tenants/")]
