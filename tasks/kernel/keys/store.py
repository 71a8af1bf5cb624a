"""Keys that sign, and keys that encrypt other keys: where they are, and how they are used.

Private keys never leave their store. A key has versions: the newest signs and encrypts, every older
one still verifies and decrypts, until the key is destroyed. Signatures are ECDSA on P-256 with
SHA-256 (FIPS 186-5), data keys are encrypted by AES-256-GCM (NIST SP 800-38D): both are known to
OpenBao's transit engine, and the first to OpenSSF model signing.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tasks.kernel.errors import SignatureError

JOURNAL, MODELS, EVIDENCE = "journal", "models", "evidence"
"""Names of keys that sign: heads of the journal, models and their sources, evidence."""
IMPORTS = "imports"
"""Name of the public keys of others, whose models may be imported; nothing here signs by it."""
ID_LENGTH = 16


@dataclass(frozen=True)
class Signature:
    """A signature and the key that made it."""

    key_id: str
    """See `id_of`."""
    der: bytes


class KeyStore(Protocol):
    """What signs and encrypts by the name of a key; a key is made by its first use."""

    def sign(self, name: str, content: bytes) -> Signature:
        """Sign by the newest version of a key.

        Raises:
            TransientError: the store does not answer.
            StorageError, ConfigurationError: it refuses.
        """

    def public_keys(self, name: str) -> Mapping[str, bytes]:
        """PEM of every version of a key by its id; they are what is trusted."""

    def encrypt(self, name: str, data_key: bytes) -> str:
        """A data key, encrypted by the newest version of a key."""

    def decrypt(self, name: str, encrypted: str) -> bytes:
        """The data key again.

        Raises:
            LostKeyError: the key or this version of it is gone, or another one encrypted it.
        """

    def rotate(self, name: str) -> None:
        """Make a new version of a key."""

    def destroy(self, name: str) -> None:
        """Destroy all versions of a key: what it encrypted cannot be read again by anybody."""


def id_of(pem: bytes) -> str:
    """Names a public key: the beginning of the SHA-256 of its DER (SubjectPublicKeyInfo)."""
    der = serialization.load_pem_public_key(pem).public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(der).hexdigest()[:ID_LENGTH]


def check_signature(
    trusted: Mapping[str, bytes], content: bytes, signature: Signature, what: str
) -> None:
    """See that a trusted key signed this content.

    Args:
        trusted: PEM of public keys by their ids.
        content: what was signed.
        signature: of it.
        what: names it in the error.

    Raises:
        SignatureError: it is of other content, or of a key that is not trusted.
    """
    pem = trusted.get(signature.key_id)
    if pem is None:
        raise SignatureError(
            f"{what} is signed by the key {signature.key_id}, which this installation does not "
            f"trust (it trusts {', '.join(trusted) or 'none'}). Nothing of it was used"
        )
    key = serialization.load_pem_public_key(pem)
    try:
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise InvalidSignature
        key.verify(signature.der, content, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as exc:
        raise SignatureError(
            f"{what} is not what the key {signature.key_id} signed: it was changed since, or the "
            "signature was. Nothing of it was used; bring it from a backup with `falaj restore`"
        ) from exc
