"""What every key store does: in files, and in a real OpenBao."""

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from tasks.kernel.errors import LostKeyError, SignatureError
from tasks.kernel.keys.files import FileKeys
from tasks.kernel.keys.openbao import OpenBaoKeys
from tasks.kernel.keys.store import KeyStore, Signature, check_signature
from tests.support.services.openbao import RunningOpenBao


@pytest.fixture(params=["files", "openbao"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> KeyStore:
    if request.param == "files":
        return FileKeys(tmp_path / "keyring")
    openbao: RunningOpenBao = request.getfixturevalue("openbao")
    return OpenBaoKeys(openbao.program("platform"), openbao.administrator(tmp_path))


@pytest.fixture
def name() -> str:
    """A key of this test alone."""
    return f"key-{uuid4().hex}"


def test_what_was_signed_before_a_rotation_stays_valid(keys: KeyStore, name: str) -> None:
    before = keys.sign(name, b"content")
    check_signature(keys.public_keys(name), b"content", before, "x")
    keys.rotate(name)
    after = keys.sign(name, b"content")
    assert before.key_id != after.key_id
    for signature in (before, after):
        check_signature(keys.public_keys(name), b"content", signature, "x")


def test_other_content_a_changed_signature_and_a_foreign_key_are_refused(
    keys: KeyStore, name: str, tmp_path: Path
) -> None:
    signature = keys.sign(name, b"content")
    trusted = keys.public_keys(name)
    flipped = Signature(signature.key_id, signature.der[:-1] + bytes([signature.der[-1] ^ 1]))
    foreign = FileKeys(tmp_path / "other").sign(name, b"content")
    pretended = Signature(signature.key_id, foreign.der)
    for content, given in [(b"contend", signature), (b"content", flipped), (b"content", pretended)]:
        with pytest.raises(SignatureError, match="model 7 is not what the key"):
            check_signature(trusted, content, given, "model 7")
    with pytest.raises(SignatureError, match=f"model 7 is signed by the key {foreign.key_id}"):
        check_signature(trusted, b"content", foreign, "model 7")


def test_a_data_key_is_decrypted_after_a_rotation_and_never_after_a_destruction(
    keys: KeyStore, name: str
) -> None:
    encrypted = keys.encrypt(name, b"k" * 32)
    keys.rotate(name)
    assert keys.decrypt(name, encrypted) == b"k" * 32
    versions = {text.rpartition(":")[0] for text in (encrypted, keys.encrypt(name, b"k" * 32))}
    assert len(versions) == 2
    keys.destroy(name)
    with pytest.raises(LostKeyError, match=name):
        keys.decrypt(name, encrypted)
    keys.encrypt(name, b"k" * 32)  # a new key
    with pytest.raises(LostKeyError, match=name):
        keys.decrypt(name, encrypted)
    keys.destroy(f"{name}-never-made")


SPOILT: list[Callable[[str], str]] = [
    lambda t: t[:-4] + "AAA=",
    lambda t: t[:20],
    lambda _: "",
    str.upper,
]


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_changed_data_key_or_one_of_another_key_is_refused(
    keys: KeyStore, name: str, spoil: Callable[[str], str]
) -> None:
    encrypted, other = keys.encrypt(name, b"k" * 32), f"{name}-other"
    keys.encrypt(other, b"k" * 32)
    with pytest.raises(LostKeyError):
        keys.decrypt(name, spoil(encrypted))
    with pytest.raises(LostKeyError):
        keys.decrypt(other, encrypted)


def test_a_key_that_was_never_used_is_trusted_for_nothing(keys: KeyStore, name: str) -> None:
    assert dict(keys.public_keys(name)) == {}
    with pytest.raises(SignatureError, match="it trusts none"):
        check_signature(keys.public_keys(name), b"x", Signature("0" * 16, b""), "x")
