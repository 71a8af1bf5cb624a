"""Who acts in a command, and what two people must do; tokens of a real issuer over HTTP."""

import io
import re
import stat
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from falaj.__main__ import main
from tasks.governance import identity
from tasks.governance.duties import acting, agreed_by_two, broken_glass, check_approver
from tasks.governance.policy import Policies
from tasks.kernel.errors import AccessError, ConfigurationError, TransientError
from tasks.kernel.settings import Settings
from tasks.kernel.tenants import Tenant, put_tenant
from tests.support.services.sign_in import Provider, provider, write_sign_in
from tests.support.services.signing import forged_tokens
from tests.support.state import acts

ABOUT = {"act": "start", "model": "delay", "version": "4", "release": "none"}


@pytest.fixture(scope="module")
def issuer() -> Iterator[Provider]:
    with provider() as made:
        yield made


@pytest.fixture
def home(issuer: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(identity.TOKEN_FILE, str(tmp_path / "token"))
    (home := tmp_path / "home").mkdir()
    write_sign_in(home, issuer.issuer, owners={"churn": "acme"})
    return home


def sign_in(home: Path, token: str) -> None:
    (home.parent / "token").write_text(token)


def test_the_machines_user_is_the_owner_where_nobody_signs_in(tmp_path: Path) -> None:
    found = acting(tmp_path, "approve", None, typed=" Ana ")
    assert (found.name, found.roles, found.is_bound) == ("Ana", identity.ROLES, False)
    check_approver(found, "Ana", "version 1")
    assert agreed_by_two(tmp_path, found, "release", ABOUT)
    assert not (tmp_path / "audit").exists()


def test_the_subject_of_the_token_acts_and_no_typed_name(home: Path, issuer: Provider) -> None:
    sign_in(home, issuer.token("approver", sub="noor"))
    assert acting(home, "approve", "flights").name == "noor"
    for problem in (
        {"typed": "ana"},
        {"use_case": "churn"},
        {"action": "administer"},
        {"break_glass": "hurry"},
    ):
        with pytest.raises(AccessError):
            acting(home, **{"action": "approve", "use_case": None, **problem})  # type: ignore[arg-type]
    assert {str(line["reason"]) for line in acts(home, "refuse")} == {
        "it is another tenant's",
        "no role of yours has the action administer",
    }


def test_no_other_token_counts(home: Path, issuer: Provider) -> None:
    now = int(time.time())
    bad = [
        *forged_tokens(issuer, "approver"),
        issuer.token("approver", aud="another"),
        issuer.token("approver", exp=now - 60),
        issuer.token("approver", iat=now - 9 * 3600),
        issuer.token("approver", iat=None),
        issuer.token("approver", sub=identity.CONTROLLER),
        *(issuer.token("approver", tenant=tenant) for tenant in (None, "", ["acme"])),
        "x" * 10_000,
    ]
    for token in bad:
        sign_in(home, token)
        with pytest.raises(AccessError):
            identity.current_subject(home)
    (home.parent / "token").unlink()
    with pytest.raises(AccessError, match="falaj login"):
        identity.current_subject(home)


def test_an_issuer_that_is_away_lets_nobody_act(home: Path, issuer: Provider) -> None:
    sign_in(home, issuer.token("approver"))
    write_sign_in(home, "http://127.0.0.1:9")
    with pytest.raises(TransientError):
        identity.current_subject(home)


def test_an_account_that_is_switched_off_gives_no_command(home: Path, issuer: Provider) -> None:
    sign_in(home, issuer.token("admin", sub="omar"))
    identity.switch(home, ["omar"], "ana", off=True)
    with pytest.raises(AccessError, match="switched off"):
        identity.current_subject(home)
    (home / "access" / "denied.json").write_text("spoilt")
    with pytest.raises(Exception, match="nobody is let in"):
        identity.current_subject(home)


def test_in_a_tenants_folder_its_own_people_act_and_switch_off_nobody_elsewhere(
    home: Path, issuer: Provider
) -> None:
    red, blue = (put_tenant(home, name, Tenant()) for name in ("red", "blue"))
    sign_in(home, issuer.token("admin", sub="rana", tenant="red"))
    assert acting(red, "administer", None).tenant == "red"
    for other in (blue, home):
        with pytest.raises(AccessError, match="another tenant's"):
            acting(other, "administer", None)
    identity.switch(home, ["omar"], "ana", off=True)
    identity.switch(red, ["rana"], "rana", off=True)
    identity.switch(red, ["omar"], "rana", off=False)
    assert {*identity.switched_off(red)} == {"rana", "omar"}
    assert {*identity.switched_off(blue)} == {"omar"}
    put_tenant(home, "falaj", Tenant())  # who runs the installation is none of them
    with pytest.raises(ConfigurationError, match="admins would be those of all"):
        acting(red, "administer", None)


def test_who_trained_does_not_approve(home: Path) -> None:
    noor = identity.Subject("noor", "falaj", ("approver",), ("*",))
    check_approver(noor, "omar", "version 1")
    check_approver(noor, identity.CONTROLLER, "version 1")
    for trained_by in ("noor", None):
        with pytest.raises(AccessError):
            check_approver(noor, trained_by, "version 1")


def test_a_release_needs_two_people_once_each_for_the_same_act(home: Path) -> None:
    noor, ali = (identity.Subject(name, "falaj", ("approver",), ("*",)) for name in ("noor", "ali"))
    assert not agreed_by_two(home, noor, "release", ABOUT)
    assert not agreed_by_two(home, noor, "release", ABOUT)
    assert not agreed_by_two(home, ali, "release", ABOUT | {"version": "5"})
    assert agreed_by_two(home, ali, "release", ABOUT)
    assert not agreed_by_two(home, ali, "release", ABOUT)  # the first agreement is spent
    (line,) = acts(home, "agreed")
    assert (line["first"], line["who"]["subject"]) == ("noor", "ali")


def test_where_people_sign_in_a_waiver_counts_when_two_of_them_agreed_to_it_as_it_is(
    home: Path,
    issuer: Provider,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    waiver = {"rule": "r", "what": "model", "where": "pool:b", "reason": "x", "until": "2999-01-01"}
    file = home / "policies" / "policy.yaml"
    file.parent.mkdir()
    monkeypatch.setenv("FALAJ_HOME", str(home))
    monkeypatch.setenv("FALAJ_FEATURE_REPO", str(home))

    def fault(**change: object) -> str | None:
        written = {**waiver, "approved_by": ["Ana", "Badr"], **change}
        file.write_text(yaml.safe_dump({"waivers": [written]}))
        policies = Policies(Settings(home, home))
        return policies.signed(policies.file.waivers[0]).fault(policies.today)

    def waive(name: str, *words: str, role: str = "approver") -> int:
        sign_in(home, issuer.token(role, sub=name))
        return main(["policy", "waive", "r", *words])

    assert "two different people" in str(fault())
    assert waive("noor", role="viewer") == waive("noor", "--what", "backup") == 2
    assert waive("noor") == waive("noor") == 0
    assert "does not count" in capsys.readouterr().out
    assert fault()
    assert waive("ali") == 0
    assert "counts until 2999-01-01" in capsys.readouterr().out
    assert fault() is None
    assert fault(where="pool:*")
    write_sign_in(home, issuer.issuer, two_approvers=[])
    assert fault(where="pool:*") is None


def test_an_admin_breaks_the_glass_loudly(
    home: Path,
    issuer: Provider,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sign_in(home, issuer.token("admin", sub="omar"))
    assert broken_glass(home) == []
    with pytest.raises(AccessError):
        acting(home, "approve", None)
    with pytest.raises(AccessError, match="reason"):
        acting(home, "approve", None, break_glass=" ")
    broken = acting(home, "approve", None, break_glass="the site is down")
    check_approver(broken, "omar", "version 1")
    assert agreed_by_two(home, broken, "release", ABOUT)
    (line,) = acts(home, "break-glass")
    assert (line["said"], line["who"]["subject"]) == ("the site is down", "omar")
    assert "omar broke the glass to approve: the site is down" in caplog.text
    monkeypatch.setenv("FALAJ_HOME", str(home))
    main(["status"])
    (shown,) = broken_glass(home)
    assert f"GLASS     {shown}" in capsys.readouterr().out
    assert re.fullmatch(r"omar broke .* approve, \d{4}-.* UTC: the site is down", shown)
    for days in (-1, 31):
        assert broken_glass(home, datetime.now(UTC) + timedelta(days=days)) == []


def test_a_token_is_kept_for_its_owner_alone(
    home: Path,
    issuer: Provider,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FALAJ_HOME", str(home))
    monkeypatch.setattr("sys.stdin", io.StringIO(issuer.token("auditor", sub="ana") + "\n"))
    assert main(["login"]) == 0
    assert stat.S_IMODE((home.parent / "token").stat().st_mode) == 0o600
    assert main(["whoami"]) == 0
    assert "ana" in capsys.readouterr().out
    assert main(["access", "off", "omar"]) != 0  # an auditor only looks
    monkeypatch.setattr("sys.stdin", io.StringIO("no token\n"))
    assert main(["login"]) != 0
