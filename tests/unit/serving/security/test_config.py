"""What a security configuration may not say, and the command for keys and certificates."""

import ssl
from pathlib import Path

import pytest
from cryptography import x509
from pydantic import ValidationError

from falaj.__main__ import main
from serving.security.certificates import Pair, ensure_authority, ensure_certificate
from serving.security.config import (
    SecurityConfig,
    SecuritySection,
    TlsConfig,
    check_address,
    check_exposure,
    read_security,
)
from serving.security.guard import secured
from serving.security.keys import create_key, read_keys
from serving.security.tls import RenewingTls, grpc_credentials, server_context
from tasks.kernel.errors import ConfigurationError

TLS = {"certificate": "c", "key": "k"}


def test_keys_come_from_files_by_https_or_from_this_machine() -> None:
    for address in (
        *("https://id.example/keys", "http://127.0.0.1:8/keys", "http://[::1]/k", "keys.json"),
    ):
        check_address(address)
    for address in (
        *("http://id.example/keys", "ftp://x/keys", "file:///k", "https://u:p@id.example/k"),
    ):
        with pytest.raises(ValueError, match="keys"):
            check_address(address)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"behind_edge": True}, "without mutual TLS"),
        ({"behind_edge": True, "tls": TLS}, "without mutual TLS"),
        (
            {"behind_edge": True, "tls": TLS | {"client_ca": "a"}, "anonymous": ["infer:m"]},
            "loopback device",
        ),
        ({"anonymous": ["everything"]}, "pattern"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(content: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        SecurityConfig.model_validate(content)


def test_a_server_that_is_open_stays_on_the_loopback_device() -> None:
    check_exposure(SecurityConfig(anonymous=("infer:*",)), "127.0.0.1")
    with pytest.raises(ConfigurationError, match="lets in everybody"):
        check_exposure(SecurityConfig(anonymous=("infer:*",)), "0.0.0.0")
    with pytest.raises(ConfigurationError, match="without TLS"):
        check_exposure(SecurityConfig(), "10.0.0.5")
    check_exposure(SecurityConfig.model_validate({"tls": TLS}), "0.0.0.0")


def test_keys_are_made_listed_and_revoked_by_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--home", str(tmp_path), "keys"]
    create = [*home, "create", "--subject", "nightly", "--role", "infer:m", "--tenant", "acme"]
    assert main([*create, "--days", "90"]) == 0
    made = capsys.readouterr()
    key = made.out.strip()
    assert key.startswith("falaj_")
    assert key not in made.err
    file = tmp_path / "serving" / "secrets" / "api-keys.json"
    (kept,) = read_keys(file)
    assert main([*home, "list"]) == 0
    listed = capsys.readouterr().out
    assert kept.id in listed
    assert "valid" in listed
    assert key not in listed
    assert main([*home, "revoke", kept.id]) == 0
    assert main([*home, "revoke", "nothing"]) == 2
    assert "has no key nothing" in capsys.readouterr().err
    assert read_keys(file)[0].revoked is not None
    assert main([*create[:-4], "--role", "everything", "--tenant", "a"]) == 2


def test_a_file_of_keys_that_others_may_write_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    create_key(file, "a", ("infer:m",))
    file.chmod(0o666)
    with pytest.raises(ConfigurationError, match="written by others"):
        read_keys(file)


def test_certificates_by_command_are_of_one_authority(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--home", str(tmp_path), "certificates", "--host", "serving.test", "--host", "::1"]
    assert main(command) == 0
    first = capsys.readouterr().out
    folder = tmp_path / "serving" / "secrets" / "tls"
    content = (folder / "server.pem").read_bytes()
    assert main(command) == 0
    assert capsys.readouterr().out == first
    assert (folder / "server.pem").read_bytes() == content
    assert folder.stat().st_mode & 0o077 == 0
    assert {f.stat().st_mode & 0o777 for f in folder.iterdir()} == {0o600}
    assert main([*command, "--host", "more.test"]) == 0
    renewed = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    names = renewed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["serving.test", "more.test"]


@pytest.fixture
def authority(tmp_path: Path) -> Pair:
    return ensure_authority(tmp_path, "authority")


@pytest.fixture
def pair(tmp_path: Path, authority: Pair) -> Pair:
    return ensure_certificate(tmp_path, "server", authority, ["localhost"], "server")


@pytest.fixture
def mutual(pair: Pair, authority: Pair) -> TlsConfig:
    return TlsConfig(certificate=pair.certificate, key=pair.key, client_ca=authority.certificate)


def test_a_server_context_speaks_tls_1_3_and_asks_for_certificates(mutual: TlsConfig) -> None:
    context = server_context(mutual)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3
    assert context.verify_mode == ssl.CERT_REQUIRED
    mutual.key.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        server_context(mutual)
    mutual.key.unlink()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        server_context(mutual)


def test_grpc_is_closed_with_mutual_tls_or_not_at_all(mutual: TlsConfig) -> None:
    with pytest.raises(ConfigurationError, match="certificate alone"):
        grpc_credentials(mutual.model_copy(update={"client_ca": None}))
    assert grpc_credentials(mutual)


def test_a_process_is_closed_by_the_files_of_its_state_folder(tmp_path: Path) -> None:
    assert secured(SecuritySection(), tmp_path, "127.0.0.1") is None
    with pytest.raises(ConfigurationError, match=r"gateway prepare"):
        secured(SecuritySection(edge=True), tmp_path, "127.0.0.1")
    assert main(["--home", str(tmp_path), "certificates", "--host", "localhost"]) == 0
    file = tmp_path / "serving" / "security.yaml"
    file.write_text("tls: {certificate: secrets/tls/server.pem, key: secrets/tls/server.key}\n")
    found = secured(SecuritySection(), tmp_path, "0.0.0.0")
    assert found.tls is not None
    assert found.grpc is None
    file.write_text("anonymous: ['infer:*']\n")
    with pytest.raises(ConfigurationError, match="lets in everybody"):
        secured(SecuritySection(), tmp_path, "0.0.0.0")


def test_a_renewed_certificate_is_seen_by_new_connections(
    tmp_path: Path, pair: Pair, authority: Pair
) -> None:
    renewing = RenewingTls(TlsConfig(certificate=pair.certificate, key=pair.key))
    assert not renewing.look()
    first = served_by(renewing.context, authority)
    ensure_certificate(tmp_path, "server", authority, ["localhost", "more.test"], "server")
    assert renewing.look()
    assert served_by(renewing.context, authority) != first
    pair.key.write_bytes(authority.key.read_bytes())
    assert not renewing.look()
    served_by(renewing.context, authority)


def served_by(context: ssl.SSLContext, authority: Pair) -> bytes | None:
    """Certificate that a client sees, with both ends in memory."""
    trusting = ssl.create_default_context(cafile=str(authority.certificate))
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(up, down, server_side=True)
    client = trusting.wrap_bio(down, up, server_hostname="localhost")
    for _ in range(4):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() == "TLSv1.3"
    return client.getpeercert(binary_form=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"issuers: {", r"security\.yaml"),
        (b"anonymous: \xff", "is no YAML"),
        (b"password: hunter2", "password: Extra inputs are not permitted. Nothing was started"),
        (b"limits: {client: {per_s: .inf}}", "limits.client.per_s"),
        (b"5", "expected names with values"),
    ],
)
def test_a_file_of_clients_that_is_wrong_says_where_and_not_what(
    tmp_path: Path, content: bytes, said: str
) -> None:
    file = tmp_path / "security.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=said) as told:
        read_security(file)
    assert "hunter2" not in str(told.value)
    assert "\n" not in str(told.value) or content[0] in b"ai"
