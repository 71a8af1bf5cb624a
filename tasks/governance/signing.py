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
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import BaseModel

from tasks.governance.journal import Journal
from tasks.kernel.errors import FalajError, SignatureError
from tasks.kernel.files import digest_of
from tasks.kernel.keys.choice import TRUSTED, key_store, trusted_keys
from tasks.kernel.keys.store import IMPORTS, MODELS, KeyStore, Signature, check_signature
from tasks.kernel.settings import (
    URI_SCHEME,
    VALUE,
    ArtifactStore,
    StagedFolder,
    bring,
    named_artifacts,
    put,
)

logger = logging.getLogger(__name__)
Value = TypeVar("Value", bound=BaseModel)

END = ".sig"
"""Of the name of a signature, beside the file that it is of."""
FOLDER = "signatures"
"""In the state, of signatures of what has no folder there."""
IMPORTED = "model.sig"
"""Name that OpenSSF model signing gives a signature, in a folder that is imported."""
SIGNED = "signed.json"
"""In the folder of a build: its value, as it was signed."""
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://model_signing/signature/v1.0"
_REFUSED: set[tuple[str, str]] = set()


def record_path(home: Path, subject: str) -> Path:
    """Where the signature of something is kept that has no folder in the state, such as a suite."""
    return home / FOLDER / f"{subject}{END}"


def record(home: Path, subject: str, files: Mapping[str, str]) -> None:
    """Sign digests as `sign`, and keep the bundle in the state."""
    put(record_path(home, subject), sign(home, subject, files))


def check_record(home: Path, subject: str, files: Mapping[str, str]) -> bool:
    """As `check`, against what `record` kept.

    Returns:
        False where nobody ever signed it: then it counts, unless `FALAJ_TRUSTED_KEYS` is set.
    """
    source = record_path(home, subject)
    if not os.environ.get(TRUSTED) and read(source) is None:
        return False
    check(home, subject, files, source)
    return True


def check_import(home: Path, folder: Path, files: Mapping[str, str]) -> dict[str, str]:
    """See that files from elsewhere are what their publisher signed, in `model.sig` beside them.

    Publishers are trusted by their keys in `keyring/imports`, apart from those that sign models.

    Returns:
        `{"signed_by": key}`; empty where they are not signed. With `FALAJ_TRUSTED_KEYS` they must.

    Raises:
        SignatureError: the signature does not fit, or the key is not trusted.
    """
    bundle = _text(folder / IMPORTED)
    if bundle is None and not os.environ.get(TRUSTED):
        return {}
    subject = subject_in(bundle or "") or str(folder)
    try:
        return {"signed_by": verify(trusted_keys(home, IMPORTS), subject, bundle, files)}
    except SignatureError as exc:
        refused(home, subject, exc)
        raise SignatureError(
            f"{folder / IMPORTED}: {exc}. The public key of a publisher whom you trust belongs "
            f"into {home}/keyring/{IMPORTS}/NAME.pub"
        ) from exc


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of files below a folder, by name; a name of a folder stands for all files in it."""
    found = (folder / name for name in names)
    inside = (p for path in found for p in (path.rglob("*") if path.is_dir() else (path,)))
    return {p.relative_to(folder).as_posix(): digest_of(p) for p in sorted(inside) if p.is_file()}


def sign(home: Path, subject: str, files: Mapping[str, str]) -> str:
    """Sign the digests of files by the newest key, and record it in the journal.

    Args:
        home: the state folder; its key store signs.
        subject: what is signed, such as `models/<name>/<run>`; part of what is signed.
        files: SHA-256 by name; outsiders look for these names below one folder.

    Returns:
        The bundle, to be kept beside what is signed.

    Raises:
        SignatureError: the key is not among those that are trusted.
        TransientError, StorageError, ConfigurationError: the key store refuses, or the disk does.
    """
    text = _bundle(key_store(home), subject, files)
    try:
        key = verify(trusted_keys(home, MODELS), subject, text, files)
    except SignatureError as exc:
        raise SignatureError(f"{exc}. It was signed here: trust this installation's key") from exc
    Journal(home / "audit").append("sign", subject=subject, key=key, files=len(files))
    return text


def check(home: Path, subject: str, files: Mapping[str, str], source: Path) -> None:
    """See that a trusted key signed these files as this subject; a refusal is recorded.

    Args:
        home: the state folder.
        subject: as it was signed.
        files: SHA-256 of files as they are now; the signature may name more.
        source: file of the bundle.

    Raises:
        SignatureError: there is no signature, it is of other content, or of an unknown key.
    """
    try:
        verify(trusted_keys(home, MODELS), subject, read(source), files)
    except SignatureError as exc:
        refused(home, subject, exc)
        raise


def read(source: Path) -> str | None:
    """The text of a bundle; None where there is none."""
    return _text(bring(source))


def _text(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return None


def refused(home: Path, subject: str, exc: FalajError) -> None:
    """Record in the journal, once a process, that something signed was refused, and log it."""
    if (subject, str(exc)) in _REFUSED:  # servers try again and again
        return
    _REFUSED.add((subject, str(exc)))
    logger.error("%s [%s]", exc, exc.code)
    with suppress(FalajError):  # a place that cannot be written must not open what is refused
        Journal(home / "audit").append(
            "refuse-signature", subject=subject, code=exc.code, outcome="refused", said=str(exc)
        )


def verify(
    trusted: Mapping[str, bytes], subject: str, bundle: str | None, files: Mapping[str, str]
) -> str:
    """As `check`, with these public keys, and nothing is recorded; returns the key's id.

    Args:
        trusted: PEM by id.
        subject: as it was signed.
        bundle: the signature; None where there is none.
        files: SHA-256 of files as they are now.

    Raises:
        SignatureError: see `check`.
    """
    if bundle is None:
        raise SignatureError(f"{subject} has no signature, expected one of a trusted key")
    try:
        content = json.loads(bundle)
        envelope, (one,) = content["dsseEnvelope"], content["dsseEnvelope"]["signatures"]
        payload = base64.b64decode(envelope["payload"], validate=True)
        der = base64.b64decode(one["sig"], validate=True)
        hint = str(content["verificationMaterial"]["publicKey"]["hint"])
        kinds = content["mediaType"], envelope["payloadType"]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise _changed(subject, "it is no bundle of OpenSSF model signing") from exc
    if kinds != (BUNDLE, PAYLOAD):
        raise _changed(subject, f"it is a {kinds[0]} of {kinds[1]}")
    key = next((i for i, pem in trusted.items() if _hint(pem) == hint), hint[:16])
    preauthenticated = b"DSSEv1 %d %s %d " % (len(PAYLOAD), PAYLOAD.encode(), len(payload))
    check_signature(trusted, preauthenticated + payload, Signature(key, der), subject)
    named, signed = _statement(subject, payload)
    if named != subject:
        raise _changed(subject, f"it is of {named}")
    if wrong := [name for name, sha256 in files.items() if signed.get(name) != sha256]:
        raise _changed(subject, f"{', '.join(wrong)} is not what was signed")
    return key


def build_signed(
    store: ArtifactStore,
    kind: str,
    key: str,
    value_type: type[Value],
    build: Callable[[StagedFolder], Value],
) -> Value:
    """As `store.build_once`; the value is signed before anybody sees it, and else refused.

    The keys are those of the state folder that the store is in.

    Raises:
        SignatureError: somebody else made what is there.
    """

    def signed(folder: StagedFolder) -> Value:
        value = build(folder)
        text = value.model_dump_json(by_alias=True)
        inside = f"{URI_SCHEME}{kind}/{key}/"
        names = {a.uri.removeprefix(inside): a.sha256 for a in named_artifacts(value)}
        files = {name: sha for name, sha in names.items() if (folder.path / name).is_file()}
        files[SIGNED] = hashlib.sha256(text.encode()).hexdigest()
        (folder.path / SIGNED).write_text(text, encoding="utf-8")
        bundle = sign(store.root.parent, f"{kind}/{key}", files)
        (folder.path / f"{SIGNED}{END}").write_text(bundle, encoding="utf-8")
        return value

    value = store.build_once(kind, key, value_type, signed)
    return _confirmed(store, kind, key, value)


def find_signed(store: ArtifactStore, kind: str, key: str, value_type: type[Value]) -> Value | None:
    """As `store.find`, for what `build_signed` has built; what was damaged is named.

    Raises:
        SignatureError: somebody else made what is there.
    """
    there = (store.root / kind / key / VALUE).exists()
    value = store.find(kind, key, value_type)
    if value is not None:
        return _confirmed(store, kind, key, value)
    if there:
        subject, home = f"{kind}/{key}", store.root.parent
        text = f"{subject} was changed or damaged; it was removed and is built again, not used"
        refused(home, subject, SignatureError(text))
    return None


def _confirmed(store: ArtifactStore, kind: str, key: str, value: Value) -> Value:
    home, subject, folder = store.root.parent, f"{kind}/{key}", store.root / kind / key
    text, bundle = (_text(store.file(folder, name)) for name in (SIGNED, f"{SIGNED}{END}"))
    digest = hashlib.sha256((text or "").encode()).hexdigest()
    try:
        verify(trusted_keys(home, MODELS), subject, bundle, {SIGNED: digest})
        if type(value).model_validate_json(text or "") != value:
            raise _changed(subject, f"{VALUE} is not what was signed")
    except SignatureError as exc:
        again = SignatureError(f"{exc}; or remove {folder}, and run again to build it anew")
        refused(home, subject, again)
        raise again from exc
    return value


def subject_in(bundle: str) -> str:
    """What a bundle says that it is of; nobody has checked it. Empty where it says nothing."""
    with suppress(ValueError, KeyError, TypeError, IndexError, RecursionError):
        payload = base64.b64decode(json.loads(bundle)["dsseEnvelope"]["payload"])
        return str(json.loads(payload)["subject"][0]["name"])
    return ""


def _statement(subject: str, payload: bytes) -> tuple[str, dict[str, str]]:
    """Subject and files of a statement that a trusted key has signed."""
    try:
        content = json.loads(payload)
        ((name, digest),) = ((s["name"], s["digest"]["sha256"]) for s in content["subject"])
        serialized = content["predicate"]["serialization"]
        kinds = [content["_type"], content["predicateType"], serialized["method"]]
        resources = content["predicate"]["resources"]
        files = {r["name"]: r["digest"] for r in resources if r["algorithm"] == "sha256"}
        root = hashlib.sha256(b"".join(bytes.fromhex(r["digest"]) for r in resources)).hexdigest()
    except (ValueError, KeyError, TypeError) as exc:
        raise _changed(subject, "its statement is none of OpenSSF model signing") from exc
    if kinds != [STATEMENT, PREDICATE, "files"] or root != digest:
        raise _changed(subject, "its statement is another than that of model signing 1.0")
    return name, files


def _changed(subject: str, why: str) -> SignatureError:
    return SignatureError(
        f"{subject}: the signature does not fit, {why}. Nothing of it was used; bring it from a "
        "backup with `falaj restore`"
    )


def _hint(pem: bytes) -> str:
    """By what a bundle names a key: SHA-256 of its PEM, as `cryptography` writes it."""
    return hashlib.sha256(_pem(serialization.load_pem_public_key(pem))).hexdigest()


def _pem(key: Any) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(key.public_bytes(serialization.Encoding.PEM, form))


class _Key:
    """A private key that stays in its store, as the library uses one."""

    def __init__(self, keys: KeyStore) -> None:
        self._keys = keys
        self._id = keys.sign(MODELS, b"").key_id  # makes the first one

    def public_key(self) -> ec.EllipticCurvePublicKey:
        """Of the version that signs."""
        key = serialization.load_pem_public_key(self._keys.public_keys(MODELS)[self._id])
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise SignatureError(f"the key {self._id} is of no elliptic curve; nothing was signed")
        return key

    def sign(self, content: bytes, algorithm: object) -> bytes:
        """Signs with SHA-256, as the store does for P-256."""
        made = self._keys.sign(MODELS, content)
        self._id = made.key_id
        return made.der


def _bundle(keys: KeyStore, subject: str, files: Mapping[str, str]) -> str:
    from model_signing import manifest
    from model_signing._hashing.hashing import Digest
    from model_signing._signing import sign_ec_key, signing

    class Signer(sign_ec_key.Signer):
        def __init__(self) -> None:  # the library's own reads a file
            self._private_key: Any = _Key(keys)

    form = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
    serialized = manifest.SerializationType.from_args(form)
    items = [
        serialized.new_item(name, Digest("sha256", bytes.fromhex(sha256)))
        for name, sha256 in files.items()
    ]
    payload = signing.Payload(manifest.Manifest(subject, items, serialized))
    made: Any = Signer().sign(payload)
    return str(made.bundle.to_json())
