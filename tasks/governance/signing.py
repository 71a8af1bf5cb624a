"""Signatures of models and of what they are made from, in the form of OpenSSF model signing 1.0.

A signature is a Sigstore bundle: a DSSE envelope (secure-systems-lab/dsse 1.0.0) around an in-toto
statement (v1) that names a subject and the SHA-256 of its files. It is made by the library of
OpenSSF, with a key of the key store; `model_signing verify` of anybody checks it with the public
key. Here it is checked by `cryptography` alone, in under a millisecond: importing the library takes
half a second, which each serving process and flow run would pay (decision 0169).

What is signed is small and holds the digests of all else, so nothing large is read twice.
"""

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from cryptography.hazmat.primitives import serialization
from pydantic import BaseModel

from tasks.governance.journal import Journal
from tasks.kernel.errors import FalajError, SignatureError
from tasks.kernel.files import digest_of
from tasks.kernel.keys.choice import TRUSTED, key_store, trusted_keys
from tasks.kernel.keys.store import IMPORTS, MODELS, KeyStore, Signature, check_signature
from tasks.kernel.settings import VALUE, ArtifactStore, StagedFolder, bring, put

Value = TypeVar("Value", bound=BaseModel)

END = ".sig"
"""Of the name of a signature, beside the file that it is of."""
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://model_signing/signature/v1.0"


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of files below a folder, by name; a name of a folder stands for all files in it."""
    inside = (path for n in names for path in (folder / n, *(folder / n).rglob("*")))
    return {p.relative_to(folder).as_posix(): digest_of(p) for p in sorted(inside) if p.is_file()}


def record_path(home: Path, subject: str) -> Path:
    """Where the signature is of what has no folder of its own in the state, such as a suite."""
    return home / "signatures" / f"{subject}{END}"


def sign(home: Path, subject: str, files: Mapping[str, str], target: Path | None = None) -> None:
    """Sign the digests of files by the newest key, and record it in the journal.

    Args:
        home: the state folder; its key store signs.
        subject: what is signed, such as `models/<name>/<run>`; part of what is signed.
        files: SHA-256 by name; outsiders look for these names below one folder.
        target: file of the state that takes the bundle; None: that of `record_path`.

    Raises:
        SignatureError: the key is not among those that are trusted; nothing was written.
        TransientError, StorageError, ConfigurationError: the key store refuses, or the disk does.
    """
    text = _bundle(key_store(home), subject, files)
    key = verify(trusted_keys(home, MODELS), subject, text, files)
    facts = {"subject": {"signed": subject}, "key": key, "files": len(files)}
    Journal(home / "audit").append("sign", outcome="ok", **facts)
    put(target or record_path(home, subject), text)


def check(
    home: Path, subject: str, files: Mapping[str, str], source: Path, *, name: str = MODELS
) -> str:
    """See that a trusted key signed these files as this subject; a refusal is recorded.

    Args:
        home: the state folder.
        subject: as it was signed.
        files: SHA-256 of files as they are now; the signature may name more.
        source: file of the bundle.
        name: of the keys that are trusted.

    Returns:
        Id of the key.

    Raises:
        SignatureError: there is no signature, it is of other content, or of an unknown key.
    """
    try:
        return verify(trusted_keys(home, name), subject, read(source), files)
    except SignatureError as exc:
        refused(home, subject, exc.code, str(exc))
        raise


def check_record(home: Path, subject: str, files: Mapping[str, str]) -> None:
    """As `check`, at `record_path`; what nobody ever signed counts without `FALAJ_TRUSTED_KEYS`."""
    source = record_path(home, subject)
    if os.environ.get(TRUSTED) or read(source) is not None:
        check(home, subject, files, source)


def check_import(home: Path, folder: Path, files: Mapping[str, str]) -> dict[str, str]:
    """See that files from elsewhere are what their publisher signed, in `model.sig` beside them.

    Returns:
        `{"signed_by": key}`; empty where they are not signed. With `FALAJ_TRUSTED_KEYS` they must.

    Raises:
        SignatureError: the signature does not fit, or no key of `keyring/imports` made it.
    """
    source = folder / "model.sig"  # as OpenSSF model signing calls it
    if not os.environ.get(TRUSTED) and not source.exists():
        return {}
    subject = subject_in(read(source)) or str(folder)
    return {"signed_by": check(home, subject, files, source, name=IMPORTS)}


def find_signed(store: ArtifactStore, kind: str, key: str, value_type: type[Value]) -> Value | None:
    """As `store.find`, of what `build_signed` made; what was damaged is named in the journal.

    Raises:
        SignatureError: somebody else made what is there, or changed it.
    """
    home, subject = store.root.parent, f"{kind}/{key}"
    there = (store.root / kind / key / VALUE).exists()
    if (value := store.find(kind, key, value_type)) is not None:
        _check_value(home, subject, value)
    elif there:
        said = f"{subject} was changed or damaged; it was removed"
        refused(home, subject, SignatureError.code, said)
    return value


def build_signed(
    store: ArtifactStore,
    kind: str,
    key: str,
    value_type: type[Value],
    build: Callable[[StagedFolder], Value],
) -> Value:
    """As `store.build_once`; the value is signed by the keys of the state that the store is in.

    Raises:
        SignatureError: somebody else made what is there, or changed it.
    """
    if (found := find_signed(store, kind, key, value_type)) is not None:
        return found
    home, subject = store.root.parent, f"{kind}/{key}"

    def signed(folder: StagedFolder) -> Value:
        value = build(folder)
        digest = _digest(value)
        sign(home, f"{subject}/{digest}", {VALUE: digest})
        return value

    value = store.build_once(kind, key, value_type, signed)
    _check_value(home, subject, value)
    return value


def _check_value(home: Path, subject: str, value: BaseModel) -> None:
    # Of two who build at once, both sign what they made, and one is first to show it.
    digest = _digest(value)
    named = f"{subject}/{digest}"
    check(home, named, {VALUE: digest}, record_path(home, named))


def _digest(value: BaseModel) -> str:
    """Of a value as it is after it was read back; it holds those of all files."""
    again = type(value).model_validate_json(value.model_dump_json(by_alias=True))
    return hashlib.sha256(again.model_dump_json().encode()).hexdigest()


def read(source: Path) -> str | None:
    """The text of a bundle; None where there is none."""
    with suppress(OSError):
        return bring(source).read_text(encoding="utf-8", errors="replace")
    return None


@cache
def refused(home: Path, subject: str, code: str, said: str) -> None:
    """Record in the journal that something signed was refused; once, as servers try again."""
    facts = {"subject": {"signed": subject}, "outcome": "refused", "code": code, "said": said}
    with suppress(FalajError):  # a place that cannot be written must not open what is refused
        Journal(home / "audit").append("refuse-signature", **facts)


def verify(
    trusted: Mapping[str, bytes], subject: str, bundle: str | None, files: Mapping[str, str]
) -> str:
    """As `check`, by these public keys (PEM by id) and this bundle; nothing is recorded.

    Raises:
        SignatureError: see `check`.
    """
    if bundle is None:
        raise _changed(subject, "for there is none")
    try:
        hint, payload, der, named, signed = _open(bundle)
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise _changed(subject, "it is no bundle of OpenSSF model signing 1.0") from exc
    key = next((i for i, pem in trusted.items() if _hint(pem) == hint), hint[:16])
    encoded = b"DSSEv1 %d %s %d %s" % (len(PAYLOAD), PAYLOAD.encode(), len(payload), payload)
    check_signature(trusted, encoded, Signature(key, der), subject)
    wrong = [name for name, sha256 in files.items() if signed.get(name) != sha256]
    if named != subject or wrong:
        raise _changed(subject, f"it is of {named} and of another {', '.join(wrong) or 'subject'}")
    return key


def subject_in(bundle: str | None) -> str:
    """What a bundle says that it is of; nobody has checked it. Empty where it says nothing."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        return _open(bundle or "")[3]
    return ""


def _open(bundle: str) -> tuple[str, bytes, bytes, str, dict[str, str]]:
    """Name of the key, what is signed, the signature, and the subject and files that it tells of.

    Raises:
        ValueError, KeyError, TypeError, RecursionError: it is no such bundle.
    """
    content = json.loads(bundle)
    envelope, hint = content["dsseEnvelope"], content["verificationMaterial"]["publicKey"]["hint"]
    (one,) = envelope["signatures"]
    payload = base64.b64decode(envelope["payload"], validate=True)
    said = json.loads(payload)
    ((name, digest),) = ((s["name"], s["digest"]["sha256"]) for s in said["subject"])
    resources = said["predicate"]["resources"]
    root = hashlib.sha256(b"".join(bytes.fromhex(r["digest"]) for r in resources)).hexdigest()
    kinds = [content["mediaType"], envelope["payloadType"], said["_type"], said["predicateType"]]
    kinds += [said["predicate"]["serialization"]["method"], digest]
    if kinds != [BUNDLE, PAYLOAD, STATEMENT, PREDICATE, "files", root]:
        raise ValueError(kinds)
    files = {r["name"]: r["digest"] for r in resources if r["algorithm"] == "sha256"}
    return str(hint), payload, base64.b64decode(one["sig"], validate=True), name, files


def _changed(subject: str, why: str) -> SignatureError:
    what_to_do = "bring it from a backup with `falaj restore`, or remove it and run again"
    if subject.startswith("deployments/"):
        what_to_do = "look at it on the server of Prefect, then call `falaj deploy`"
    elif subject.startswith("images/"):
        what_to_do = "see that it is yours, then sign its digest: docs/how-to/images.md"
    return SignatureError(
        f"{subject}: the signature does not fit, {why}. Nothing of it was used; {what_to_do}"
    )


def _hint(pem: bytes) -> str:
    """By what a bundle names a key: SHA-256 of its PEM, as `cryptography` writes it."""
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(serialization.load_pem_public_key(pem).public_bytes(*form)).hexdigest()


def _bundle(keys: KeyStore, subject: str, files: Mapping[str, str]) -> str:
    from model_signing import manifest
    from model_signing._hashing.hashing import Digest
    from model_signing._signing import sign_ec_key, signing

    key_id = keys.sign(MODELS, b"").key_id  # its first use makes a key
    public = serialization.load_pem_public_key(keys.public_keys(MODELS)[key_id])

    class Signer(sign_ec_key.Signer):
        def __init__(self) -> None:  # the library's own reads a private key from a file
            use = {"sign": lambda content, _: keys.sign(MODELS, content).der}
            self._private_key: Any = SimpleNamespace(public_key=lambda: public, **use)

    form = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
    kind = manifest.SerializationType.from_args(form)
    items = [kind.new_item(n, Digest("sha256", bytes.fromhex(sha))) for n, sha in files.items()]
    made: Any = Signer().sign(signing.Payload(manifest.Manifest(subject, items, kind)))
    return str(made.bundle.to_json())
