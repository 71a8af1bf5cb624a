"""A real OpenBao: its set-up, what its tokens may, people, certificates, and when it is away."""

import shutil
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store

from falaj.__main__ import main
from infra.bench.processes import running
from infra.orchestration.embedded import free_port
from infra.platform import openbao as platform
from infra.platform.config import OPENBAO, PlatformConfig
from infra.platform.files import PlatformFiles
from infra.platform.services import Plan, openbao_service
from infra.platform.supervisor import Child
from tasks.kernel.errors import ConfigurationError, NotRunningError, TransientError
from tasks.kernel.files import write_atomically
from tasks.kernel.keys.choice import key_store
from tasks.kernel.keys.openbao import OpenBao, OpenBaoKeys, RefusedError
from tasks.kernel.keys.store import check_signature
from tasks.kernel.process import attempts
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.host.processes import wait_until
from tests.support.services.openbao import RunningOpenBao


def test_a_rotation_elsewhere_is_seen_and_known_keys_are_not_asked_for(
    openbao: RunningOpenBao,
) -> None:
    here, elsewhere = (OpenBaoKeys(openbao.program(name)) for name in ("serving", "platform"))
    audit = openbao.files.folder / "audit.log"
    trusted, also = (OpenBaoKeys(here.bao).public_keys("models") for _ in range(2))
    for _ in range(2):
        signature = elsewhere.sign("models", b"x")
        assert next(key_id for key_id in also if key_id == signature.key_id)
        check_signature(trusted, b"x", signature, "x")
        before = audit.stat().st_size
        check_signature(trusted, b"x", signature, "x")
        assert next(key_id for key_id in also if key_id == signature.key_id)
        assert audit.stat().st_size == before
        elsewhere.rotate("models")


@pytest.mark.parametrize(
    ("name", "method", "path"),
    [
        ("serving", "post", "transit/sign/models"),
        ("serving", "post", "transit/encrypt/models"),
        ("worker", "post", "transit/keys/models/rotate"),
        ("worker", "post", "pki/issue/service"),
        ("platform", "get", "transit/export/signing-key/models"),
        ("platform", "post", "transit/keys/models/config"),
        ("platform", "delete", "transit/keys/models"),
        ("platform", "list", "identity/entity/name"),
        ("accounts", "post", "transit/sign/models"),
        ("accounts", "post", "sys/policies/acl/falaj-accounts"),
    ],
)
def test_a_program_may_no_more_than_it_needs(
    openbao: RunningOpenBao, name: str, method: str, path: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"refuses the token of .*{name} to {method} "):
        openbao.program(name).ask(method, path)


def test_a_key_is_destroyed_by_an_administrators_token_alone(openbao: RunningOpenBao) -> None:
    keys = OpenBaoKeys(openbao.program("platform"))
    encrypted = keys.encrypt("tenant-kept", b"k" * 32)
    with pytest.raises(ConfigurationError, match="FALAJ_KEYS_ADMIN_TOKEN_FILE"):
        keys.destroy("tenant-kept")
    with pytest.raises(ConfigurationError, match="refuses the token"):
        OpenBaoKeys(keys.bao, openbao.program("platform")).destroy("tenant-kept")
    assert keys.decrypt("tenant-kept", encrypted) == b"k" * 32


def test_an_admin_of_another_tenant_is_none_of_openbao(
    openbao: RunningOpenBao, tmp_path: Path
) -> None:
    openbao.add("zayd", "admin", "auditor", tenant="blue")
    write_atomically(tmp_path / "zayd", openbao.sign_in("zayd"), private=True)
    theirs = OpenBao(openbao.url, tmp_path / "zayd", openbao.files.authority.certificate)
    for method, path in (
        ("post", "identity/entity/name/zayd"),
        ("post", "auth/userpass/users/omar"),
        ("list", "identity/entity/name"),
        ("delete", "transit/keys/models"),
    ):
        with pytest.raises(ConfigurationError, match="refuses the token"):
            theirs.ask(method, path, metadata={"tenant": "red"})
    assert openbao.administrator(tmp_path).ask("list", "identity/entity/name")["data"]["keys"]


def test_an_engine_of_a_tenant_is_its_alone(openbao: RunningOpenBao, tmp_path: Path) -> None:
    """With the policy that the page shows."""
    page = (PROJECT_ROOT / "docs" / "how-to" / "tenants.md").read_text()
    policy, root = page.partition("<<'END'")[2].partition("END")[0], openbao.root(tmp_path)
    root.ask("post", "sys/mounts/transit-red", type="transit")
    root.ask("post", "sys/policies/acl/red", policy=policy)
    token = root.ask("post", "auth/token/create", policies=["red"])["auth"]["client_token"]
    write_atomically(tmp_path / "red", token, private=True)
    red = OpenBao(openbao.url, tmp_path / "red", openbao.files.authority.certificate)
    keys = OpenBaoKeys(red, None, "transit-red")
    encrypted = keys.encrypt("red", b"k" * 32)
    keys.rotate("red")
    assert keys.decrypt("red", encrypted) == b"k" * 32
    keys.sign("models", b"x")
    for bao, mount in ((red, "transit"), (openbao.program("platform"), "transit-red")):
        with pytest.raises(ConfigurationError, match="refuses the token"):
            OpenBaoKeys(bao, None, mount).decrypt("red", encrypted)


def test_an_open_or_absent_token_file_a_wrong_token_and_a_foreign_authority_are_refused(
    openbao: RunningOpenBao, tmp_path: Path
) -> None:
    ca, file = openbao.files.authority.certificate, tmp_path / "token"
    for content, mode, seen in (
        ("t", 0o644, "mode 644"),
        ("t", 0o600, "refuses the token of"),
        ("a b c", 0o600, "has 3 words"),
        (None, 0, "cannot be read"),
    ):
        file.unlink(missing_ok=True)
        if content:
            file.write_text(content)
            file.chmod(mode)
        with pytest.raises(ConfigurationError, match=seen):
            OpenBaoKeys(OpenBao(openbao.url, file, ca)).sign("models", b"x")
    with pytest.raises(ConfigurationError, match="is not certified by an authority"):
        OpenBao(openbao.url, None).ask("get", "sys/init")


def test_a_new_token_in_the_file_is_used_when_the_old_one_ends(
    openbao: RunningOpenBao, tmp_path: Path
) -> None:
    admin = openbao.administrator(tmp_path)
    admin.ask("get", "auth/token/lookup-self")
    admin.ask("post", "auth/token/revoke-self")
    openbao.administrator(tmp_path)
    assert admin.ask("get", "auth/token/lookup-self")["data"]["display_name"].endswith("strator")


def test_who_signs_in_is_told_with_roles_and_tenant_and_is_refused_at_once(
    openbao: RunningOpenBao,
) -> None:
    openbao.add("amal", "viewer", "approver", tenant="red", use_cases="flights,traffic")
    given = openbao.tokens("amal")
    context = ssl.create_default_context(cafile=openbao.files.authority.certificate)
    issuer = openbao.oidc["issuer"]
    found = jwt.PyJWKClient(f"{issuer}/.well-known/keys", ssl_context=context)
    claims = jwt.decode(
        given["id_token"],
        found.get_signing_key_from_jwt(given["id_token"]).key,
        algorithms=["RS256"],
        audience=openbao.oidc["client_id"],
        issuer=issuer,
    )
    assert {*claims["roles"]} == {"viewer", "approver"}
    assert (claims["tenant"], claims["use_cases"]) == ("red", "flights,traffic")
    assert claims["username"] == "amal"
    assert claims["exp"] - claims["iat"] == 15 * 60
    with pytest.raises(httpx.HTTPStatusError):
        openbao.tokens("amal", redirect="http://127.0.0.1:9/elsewhere")

    own = openbao.sign_in("amal")
    platform.disable_account(openbao.program("accounts"), "amal")
    refused: list[Callable[[], Any]] = [
        lambda: openbao.userinfo(given["access_token"]),
        lambda: openbao.tokens("amal", own),
        lambda: openbao.sign_in("amal"),
    ]
    for ask in refused:
        with pytest.raises(httpx.HTTPStatusError, match=r"40[13]"):
            ask()
    known = platform.accounts(openbao.program("accounts"))
    (seen,) = (each for each in known if each["name"] == "amal")
    assert seen["disabled"]

    openbao.add("amal", "operator")
    assert openbao.userinfo(openbao.tokens("amal")["access_token"])["roles"] == ["operator"]
    with pytest.raises(ConfigurationError, match="'Amal' is no account"):
        openbao.add("Amal", "admin")
    with pytest.raises(RefusedError):
        platform.disable_account(openbao.program("accounts"), "nobody")


def test_who_has_no_account_is_not_switched_off_and_without_openbao_nobody_is(
    openbao: RunningOpenBao, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    openbao.add("hind", "viewer")
    denied = Path("access") / "denied.json"

    def disable(home: Path, name: str) -> int:
        return main(["--home", str(home), "accounts", "disable", name])

    for nobody in ("hnd", "accounts", "../../group/name/viewer", ""):
        assert disable(openbao.home, nobody) == 2
    assert "hind" in capsys.readouterr().err
    assert not (openbao.home / denied).exists()
    shutil.copytree(openbao.home / "openbao", tmp_path / "openbao")
    client = tmp_path / "openbao" / "client.json"
    client.write_text(client.read_text().replace(openbao.url, "https://127.0.0.1:9"))
    assert disable(tmp_path, "hind") == 1
    assert not (tmp_path / denied).exists()
    assert disable(openbao.home, "hind") == 0
    assert "hind" in (openbao.home / denied).read_text()


def test_certificates_are_of_its_authority_and_short(
    openbao: RunningOpenBao, tmp_path: Path
) -> None:
    hosts, bao = ["models.example.org", "127.0.0.1"], openbao.program("platform")
    pair, authority = platform.issue_certificate(bao, tmp_path / "tls", hosts)
    assert pair.key.stat().st_mode & 0o777 == 0o600
    leaf, root = (
        x509.load_pem_x509_certificate(each.certificate.read_bytes()) for each in (pair, authority)
    )
    verifier = PolicyBuilder().store(Store([root]))
    verifier.build_server_verifier(x509.DNSName(hosts[0])).verify(leaf, [])
    assert leaf.not_valid_after_utc < datetime.now(UTC) + timedelta(days=30, minutes=1)


class Killed(BaseException):
    """Stands for the end of the process that sets OpenBao up."""


@contextmanager
def started(files: platform.OpenBaoFiles, port: int, log: Path) -> Iterator[str]:
    url = f"https://127.0.0.1:{port}"
    platform.prepare(files, "127.0.0.1", port, url)

    def answers() -> bool:
        nobody = OpenBao(url, None, files.authority.certificate)
        with suppress(TransientError):
            return bool(nobody.ask("get", "sys/seal-status"))
        return False

    with running(platform.command(files), log, answers):
        yield url


def set_up_soon(files: platform.OpenBaoFiles, url: str) -> None:
    """As the platform's probe does, until OpenBao has unsealed itself."""
    for _ in attempts(30, 0.1):
        with suppress(TransientError):
            return platform.set_up(files, url)
    raise TimeoutError


def test_a_set_up_that_is_killed_after_any_request_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, ask, left = platform.OpenBaoFiles(tmp_path), OpenBao.ask, 0
    log, port, token = tmp_path / "log", free_port(), ""

    def ask_and_die(bao: OpenBao, method: str, path: str, **data: Any) -> dict[str, Any]:
        nonlocal left
        answer = ask(bao, method, path, **data)
        left -= 1
        if not left:
            raise Killed
        return answer

    monkeypatch.setattr(OpenBao, "ask", ask_and_die)
    with started(files, port, log) as url:
        left = 1  # initialised, and the first token is lost
        with pytest.raises(Killed):
            set_up_soon(files, url)
        with pytest.raises(ConfigurationError, match="already initialized"):
            set_up_soon(files, url)
    with started(files, port, log) as url:
        for number in range(2, 1000):
            left = number
            with suppress(Killed):
                set_up_soon(files, url)
                break
            token = token or files.root.read_text()
        left = 0
        assert number > 30
        assert not files.root.exists()
        write_atomically(tmp_path / "root", token, private=True)
        with pytest.raises(ConfigurationError, match="refuses the token"):
            OpenBao(url, tmp_path / "root", files.authority.certificate).ask("get", "sys/mounts")
        assert len(files.recovery.read_text()) > 40
        signature = key_store(tmp_path, {}).sign("models", b"x")
        assert signature.key_id in key_store(tmp_path, {}).public_keys("models")
    with pytest.raises(TransientError, match="is away"):
        key_store(tmp_path, {}).sign("models", b"x")


def test_the_platform_keeps_it_alive_and_it_unseals_itself(tmp_path: Path) -> None:
    files = PlatformFiles(tmp_path)
    plan = Plan(files, PlatformConfig(openbao=True), {OPENBAO: free_port()}, None, {}, ())
    child = Child(openbao_service(plan), tmp_path / "log")
    with pytest.raises(NotRunningError):
        platform.program(tmp_path, "platform")

    def is_up() -> bool:
        child.check()
        return child.condition == "up"

    try:
        child.start()
        wait_until(is_up, "it is up", 120)
        encrypted = key_store(tmp_path, {}).encrypt("tenant", b"k" * 32)
        child.kill()
        wait_until(lambda: not is_up(), "its end is noticed", 120)
        wait_until(is_up, "it is up again", 120)
        assert child.restarts == 1
        assert key_store(tmp_path, {}).decrypt("tenant", encrypted) == b"k" * 32
    finally:
        child.kill()
        wait_until(lambda: child.gone, "its end", 120)
    platform.OpenBaoFiles(tmp_path).seal.unlink()
    child.start()
    assert "seal.key is gone" in child.detail
