"""Keys in files: who reads them, lost and damaged ones, and when others are used."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.kernel.errors import ConfigurationError, LostKeyError
from tasks.kernel.keys.choice import key_store
from tasks.kernel.keys.files import FileKeys
from tasks.kernel.keys.store import check_signature


@pytest.fixture
def keys(tmp_path: Path) -> FileKeys:
    return FileKeys(tmp_path / "keyring")


def test_only_the_owner_reads_private_keys(keys: FileKeys) -> None:
    keys.sign("models", b"x")
    secrets = keys.folder / "secrets"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    assert stat.S_IMODE((secrets / "models.json").stat().st_mode) == 0o600


def test_a_lost_private_key_is_replaced_and_what_it_signed_stays_valid(keys: FileKeys) -> None:
    signature = keys.sign("models", b"x")
    (keys.folder / "secrets" / "models.json").unlink()
    assert keys.sign("models", b"x").key_id != signature.key_id
    check_signature(keys.public_keys("models"), b"x", signature, "x")


def test_damaged_private_keys_are_named_and_kept(keys: FileKeys) -> None:
    keys.sign("models", b"x")
    file = keys.folder / "secrets" / "models.json"
    file.write_text("[1")
    with pytest.raises(LostKeyError, match=str(file)):
        keys.sign("models", b"x")
    assert file.read_text() == "[1"


def test_processes_that_sign_at_once_make_one_key(keys: FileKeys) -> None:
    program = (
        "import sys; from pathlib import Path; from tasks.kernel.keys.files import FileKeys\n"
        "print(FileKeys(Path(sys.argv[1])).sign('models', b'x').key_id)"
    )
    args = [sys.executable, "-c", program, str(keys.folder)]
    running = [subprocess.Popen(args, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert len({process.communicate()[0] for process in running}) == 1
    assert len(keys.public_keys("models")) == 1


def test_no_data_key_is_encrypted_where_machines_share_the_state(
    keys: FileKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path))
    monkeypatch.setenv("FALAJ_STATE", (tmp_path / "shared").as_uri())
    with pytest.raises(ConfigurationError, match=r"the key 'tenant-a' .* machine alone"):
        keys.encrypt("tenant-a", b"k" * 32)
    assert not (keys.folder / "secrets").exists()
    signature = keys.sign("models", b"x")  # each machine signs by its own, and trusts those of all
    check_signature(keys.public_keys("models"), b"x", signature, "x")


def test_without_an_address_keys_are_in_the_state_folder(tmp_path: Path) -> None:
    assert key_store(tmp_path, {}) == FileKeys(tmp_path / "keyring")


@pytest.mark.parametrize(
    ("address", "token_file", "seen"),
    [
        ("http://keys.example.org:8200", "t", "FALAJ_KEYS is http://keys.example.org:8200"),
        ("keys.example.org", "t", "FALAJ_KEYS is keys.example.org"),
        ("https://keys.example.org:8200", "", "FALAJ_KEYS_TOKEN_FILE is not set"),
    ],
)
def test_an_open_address_or_one_without_a_token_is_refused(
    tmp_path: Path, address: str, token_file: str, seen: str
) -> None:
    with pytest.raises(ConfigurationError, match=seen):
        key_store(tmp_path, {"FALAJ_KEYS": address, "FALAJ_KEYS_TOKEN_FILE": token_file})
