import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_signing
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tasks.governance import signing
from tasks.governance.journal import Journal
from tasks.kernel.errors import ConfigurationError, SignatureError
from tasks.kernel.keys.choice import key_store
from tasks.kernel.keys.store import MODELS

SUBJECT = "models/m/run"
Change = Callable[[dict[str, Any], dict[str, Any]], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two signed files."""
    folder = tmp_path / "model"
    (folder / "inside").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"a" * 1000)
    (folder / "inside" / "b.bin").write_bytes(b"b")
    found = signing.digests(folder, ["a.bin", "inside"])
    signing.sign(tmp_path / "home", SUBJECT, found, folder / "a.bin.sig")
    return folder


def our_verdict(folder: Path, source: Path) -> bool:
    found = signing.digests(folder, ["a.bin", "inside"])
    try:
        signing.check(folder.parent / "home", SUBJECT, found, source)
    except SignatureError:
        return False
    return True


def their_verdict(folder: Path, source: Path) -> bool:
    (key,) = (folder.parent / "home" / "keyring" / MODELS).glob("*.pub")
    verifying = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=key)
    try:
        verifying.set_ignore_unsigned_files(True).verify(folder, source)
    except Exception:  # whatever a library says of a file that it was not made for
        return False
    return True


def changed(source: Path, change: Change, home: Path | None) -> None:
    """Change a bundle and its statement; signed again where there are keys to do it with."""
    bundle = json.loads(source.read_text())
    envelope = bundle["dsseEnvelope"]
    said = json.loads(base64.b64decode(envelope["payload"]))
    change(bundle, said)
    payload = json.dumps(said).encode()
    envelope["payload"] = base64.b64encode(payload).decode()
    if home is not None:
        kind = signing.PAYLOAD.encode()
        encoded = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
        made = key_store(home).sign(MODELS, encoded)
        for one in envelope["signatures"]:
            one["sig"] = base64.b64encode(made.der).decode()
    source.write_text(json.dumps(bundle))


CHANGES: dict[str, Change] = {
    "nothing": lambda bundle, said: None,
    "media type": lambda bundle, said: bundle.update(mediaType="application/json"),
    "kind of payload": lambda bundle, said: bundle["dsseEnvelope"].update(payloadType="text"),
    "kind of statement": lambda bundle, said: said.update(_type="another"),
    "kind of predicate": lambda bundle, said: said.update(predicateType="another"),
    "way of hashing": lambda bundle, said: said["predicate"]["serialization"].update(method="x"),
    "a digest": lambda bundle, said: said["predicate"]["resources"][0].update(digest="00" * 32),
    "a name": lambda bundle, said: said["predicate"]["resources"][0].update(name="c.bin"),
    "root": lambda bundle, said: said["subject"][0]["digest"].update(sha256="00" * 32),
    "two subjects": lambda bundle, said: said["subject"].append(said["subject"][0]),
    "no signature": lambda bundle, said: bundle["dsseEnvelope"].update(signatures=[]),
    "key": lambda bundle, said: bundle["verificationMaterial"].update(publicKey={"hint": "00"}),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("signed_again", [True, False])
def test_what_the_library_refuses_is_refused(folder: Path, name: str, signed_again: bool) -> None:
    source, home = folder / "a.bin.sig", folder.parent / "home"
    assert our_verdict(folder, source)
    assert their_verdict(folder, source)
    changed(source, CHANGES[name], home if signed_again else None)
    ours, theirs = our_verdict(folder, source), their_verdict(folder, source)
    assert theirs or not ours
    assert ours == (name == "nothing" and signed_again)


@pytest.mark.parametrize("text", ["", "{}", "[]", "[" * 100_000, "\xff", '{"dsseEnvelope": 1}'])
def test_what_is_no_bundle_is_refused(folder: Path, text: str) -> None:
    (folder / "a.bin.sig").write_text(text)
    assert not our_verdict(folder, folder / "a.bin.sig")


def test_a_flipped_byte_is_refused_by_both_and_recorded_once(folder: Path) -> None:
    (folder / "inside" / "b.bin").write_bytes(b"c")
    source = folder / "a.bin.sig"
    assert not their_verdict(folder, source)
    assert not our_verdict(folder, source)
    assert not our_verdict(folder, source)
    lines = [line.content for line in Journal(folder.parent / "home" / "audit").lines()]
    assert [line["action"] for line in lines] == ["begin-journal", "sign", "refuse-signature"]
    assert (lines[2]["code"], lines[2]["subject"]) == ("F520", {"signed": SUBJECT})
    assert "inside/b.bin" in lines[2]["said"]


def test_who_writes_the_state_adds_no_key_to_a_folder_of_trust(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, trust = folder.parent / "home", folder.parent / "trust"
    monkeypatch.setenv("FALAJ_TRUSTED_KEYS", str(trust))
    with pytest.raises(ConfigurationError, match=r"which has no models/\*\.pub; copy there"):
        signing.sign(home, SUBJECT, {})
    (trust / MODELS).mkdir(parents=True)
    for pem in (home / "keyring" / MODELS).glob("*.pub"):
        (trust / MODELS / pem.name).write_bytes(pem.read_bytes())
    assert our_verdict(folder, folder / "a.bin.sig")
    key_store(home).rotate(MODELS)
    assert our_verdict(folder, folder / "a.bin.sig")
    with pytest.raises(SignatureError, match="does not trust"):
        signing.sign(home, SUBJECT, {})


def test_an_import_is_what_a_trusted_publisher_signed(folder: Path, tmp_path: Path) -> None:
    home, private = tmp_path / "home", tmp_path / "publisher.pem"
    found = signing.digests(folder, ["a.bin"])
    assert signing.check_import(home, folder, found) == {}
    key = ec.generate_private_key(ec.SECP256R1())
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    made = model_signing.signing.Config().use_elliptic_key_signer(private_key=private)
    made.sign(folder, folder / "model.sig")
    with pytest.raises(SignatureError, match="does not trust"):
        signing.check_import(home, folder, found)
    known = home / "keyring" / "imports"
    known.mkdir(parents=True)
    public = serialization.PublicFormat.SubjectPublicKeyInfo
    pem = key.public_key().public_bytes(serialization.Encoding.PEM, public)
    (known / "publisher.pub").write_bytes(pem)
    assert signing.check_import(home, folder, found).keys() == {"signed_by"}
    with pytest.raises(SignatureError, match=r"another a\.bin"):
        signing.check_import(home, folder, {"a.bin": hashlib.sha256(b"").hexdigest()})
