"""Keys in files: what they sign and encrypt, rotated, destroyed, lost and damaged."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.kernel.errors import LostKeyError, SignatureError
from tasks.kernel.keys.choice import key_store
from tasks.kernel.keys.files import FileKeys
from tasks.kernel.keys.store import Signature, check_signature


@pytest.fixture
def keys(tmp_path: Path) -> FileKeys:
    return FileKeys(tmp_path / "keyring")


def test_what_was_signed_before_a_rotation_stays_valid(keys: FileKeys) -> None:
    before = keys.sign("models", b"content")
    keys.rotate("models")
    after = keys.sign("models", b"content")
    assert before.key_id != after.key_id
    for signature in (before, after):
        check_signature(keys.public_keys("models"), b"content", signature, "x")


def test_other_content_a_changed_signature_and_a_foreign_key_are_refused(
    keys: FileKeys, tmp_path: Path
) -> None:
    signature = keys.sign("models", b"content")
    trusted = keys.public_keys("models")
    flipped = Signature(signature.key_id, signature.der[:-1] + bytes([signature.der[-1] ^ 1]))
    foreign = FileKeys(tmp_path / "other").sign("models", b"content")
    pretended = Signature(signature.key_id, foreign.der)
    for content, given in [(b"contend", signature), (b"content", flipped), (b"content", pretended)]:
        with pytest.raises(SignatureError, match="model 7 is not what the key"):
            check_signature(trusted, content, given, "model 7")
    with pytest.raises(SignatureError, match=f"model 7 is signed by the key {foreign.key_id}"):
        check_signature(trusted, b"content", foreign, "model 7")


def test_a_data_key_is_decrypted_after_a_rotation_and_never_after_a_destruction(
    keys: FileKeys,
) -> None:
    encrypted = keys.encrypt("tenant-a", b"k" * 32)
    keys.rotate("tenant-a")
    assert keys.decrypt("tenant-a", encrypted) == b"k" * 32
    assert keys.encrypt("tenant-a", b"k" * 32).split(":")[0] != encrypted.split(":")[0]
    keys.destroy("tenant-a")
    keys.encrypt("tenant-a", b"k" * 32)  # a new key
    with pytest.raises(LostKeyError):
        keys.decrypt("tenant-a", encrypted)


@pytest.mark.parametrize(
    "spoil", [lambda t: t[:-4] + "AAA=", lambda t: t[:20], lambda _: "", str.upper]
)
def test_a_changed_data_key_or_one_of_another_key_is_refused(keys: FileKeys, spoil) -> None:  # type: ignore[no-untyped-def]
    encrypted = keys.encrypt("tenant-a", b"k" * 32)
    keys.encrypt("tenant-b", b"k" * 32)
    with pytest.raises(LostKeyError):
        keys.decrypt("tenant-a", spoil(encrypted))
    with pytest.raises(LostKeyError):
        keys.decrypt("tenant-b", encrypted)


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


def test_without_an_address_keys_are_in_the_state_folder(tmp_path: Path) -> None:
    keys = key_store(tmp_path, {})
    assert isinstance(keys, FileKeys)
    assert keys.folder == tmp_path / "keyring"
