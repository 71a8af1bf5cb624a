"""Envelopes: content encrypted by a data key, which lies encrypted beside it.

    header, 512 bytes: magic, JSON {"key", "data_key", "salt", "prefix"}, spaces
    chunks of 64 KiB, each AES-256-GCM with its tag of 16 bytes

Chunks are numbered in their nonces and the last one is marked there, so none can be removed,
repeated or exchanged: the construction STREAM (Hoang, Reyhanitabar, Rogaway and Vizar, CRYPTO
2015), with a key of each object's own by HKDF (RFC 5869) as in Tink's AES-GCM-HKDF streaming. The
object's name goes into that key, so no object passes for another. A part is read without the rest.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tasks.kernel.errors import ArtifactError
from tasks.kernel.keys.store import KeyStore

MAGIC = b"FALAJ-ENVELOPE-1\n"
HEADER_BYTES, CHUNK_BYTES, TAG_BYTES = 512, 64 * 1024, 16
KEY_BYTES, SALT_BYTES, PREFIX_BYTES = 32, 16, 7
DATA_KEY_S = 600
"""How long a process encrypts by one data key: a rotated key is used within this time."""
Fetch = Callable[[int, int], bytes]
"""Gives bytes of an object: first one, number; fewer at its end."""


@dataclass(frozen=True)
class Envelopes:
    """Seals and opens content by one key of a key store; safe to share between threads."""

    keys: KeyStore
    name: str
    """Of the key that encrypts data keys; what others encrypted is opened by theirs."""

    def seal(self, where: str, content: Iterable[bytes]) -> Iterator[bytes]:
        """The envelope of a content.

        Args:
            where: name under which it will be read.
            content: in pieces of any length.
        """
        encrypted, data_key = _data_key(self.keys, self.name, int(time.time() / DATA_KEY_S))
        salt, prefix = os.urandom(SALT_BYTES), os.urandom(PREFIX_BYTES)
        facts = {"key": self.name, "data_key": encrypted}
        facts |= {"salt": salt.hex(), "prefix": prefix.hex()}
        yield (MAGIC + json.dumps(facts).encode()).ljust(HEADER_BYTES)
        cipher, waiting, number = _cipher(data_key, salt, where), b"", 0
        for piece in content:
            waiting += piece
            start = 0
            while len(waiting) - start > CHUNK_BYTES:
                chunk = waiting[start : start + CHUNK_BYTES]
                yield cipher.encrypt(_nonce(prefix, number, last=False), chunk, None)
                number, start = number + 1, start + CHUNK_BYTES
            waiting = waiting[start:]
        yield cipher.encrypt(_nonce(prefix, number, last=True), waiting, None)

    def open(self, where: str, num_bytes: int, fetch: Fetch, start: int = 0) -> Iterator[bytes]:
        """The content of an envelope from a byte on, chunk by chunk.

        Args:
            where: name under which it was sealed.
            num_bytes: of the whole envelope.
            fetch: gives its bytes.
            start: first byte of the content.

        Raises:
            ArtifactError: it is no envelope, was changed or cut, or is another object's.
            LostKeyError: the key of its data key is gone.
        """
        header = fetch(0, HEADER_BYTES)
        cipher, prefix = self._opened(where, header)
        size = content_bytes(num_bytes)
        num_chunks = max(1, -(-size // CHUNK_BYTES))
        for number in range(start // CHUNK_BYTES, num_chunks):
            first = HEADER_BYTES + number * (CHUNK_BYTES + TAG_BYTES)
            sealed = fetch(first, CHUNK_BYTES + TAG_BYTES)
            try:
                nonce = _nonce(prefix, number, last=number == num_chunks - 1)
                chunk = cipher.decrypt(nonce, sealed, None)
            except InvalidTag as exc:
                raise ArtifactError(
                    f"{where}: chunk {number} of {num_chunks} was changed, cut or is of another "
                    "object. Nothing of it was used; bring it from a backup: `falaj restore`"
                ) from exc
            yield chunk[max(0, start - number * CHUNK_BYTES) :]

    def _opened(self, where: str, header: bytes) -> tuple[AESGCM, bytes]:
        try:
            if not is_envelope(header):
                raise ValueError(header)
            facts = json.loads(header[len(MAGIC) :])
            salt, prefix = bytes.fromhex(facts["salt"]), bytes.fromhex(facts["prefix"])
            name, encrypted = str(facts["key"]), str(facts["data_key"])
        except (ValueError, KeyError, TypeError) as exc:
            raise ArtifactError(
                f"{where} is no envelope, or it was changed; expected one, as encryption is on. "
                "`falaj encryption enable` encrypts what was written before. It was not used"
            ) from exc
        return _cipher(_decrypted(self.keys, name, encrypted), salt, where), prefix


def is_envelope(beginning: bytes) -> bool:
    """Whether content begins as an envelope does."""
    return beginning.startswith(MAGIC)


def sealed_range(start: int, end: int) -> tuple[int, int]:
    """First byte of an envelope, and the one after the last, that hold bytes of its content."""
    first, last = start // CHUNK_BYTES, max(start, end - 1) // CHUNK_BYTES + 1
    return tuple(HEADER_BYTES + n * (CHUNK_BYTES + TAG_BYTES) for n in (first, last))  # type: ignore[return-value]


def content_bytes(size: int) -> int:
    """Bytes of the content of an envelope of so many bytes; below 0: it is none."""
    inside = size - HEADER_BYTES
    return inside - max(1, -(-inside // (CHUNK_BYTES + TAG_BYTES))) * TAG_BYTES


@lru_cache(maxsize=16)
def _data_key(keys: KeyStore, name: str, _: int) -> tuple[str, bytes]:
    """A data key of this process for a while, encrypted and as it is."""
    data_key = os.urandom(KEY_BYTES)
    return keys.encrypt(name, data_key), data_key


@lru_cache(maxsize=4096)
def _decrypted(keys: KeyStore, name: str, encrypted: str) -> bytes:
    return keys.decrypt(name, encrypted)


def _cipher(data_key: bytes, salt: bytes, where: str) -> AESGCM:
    return AESGCM(HKDF(hashes.SHA256(), KEY_BYTES, salt, where.encode()).derive(data_key))


def _nonce(prefix: bytes, number: int, *, last: bool) -> bytes:
    return prefix + number.to_bytes(4, "big") + bytes([last])
