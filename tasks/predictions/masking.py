"""Masked fields: digests under a key that only this installation has (HMAC with SHA-256)."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.kernel.errors import ConfigurationError, refused_writes_explained
from tasks.kernel.files import private_folder
from tasks.predictions.schema import log_root

KEY_BYTES = 32
DIGEST_CHARACTERS = 32
"""Of 64: 128 bits, more than chance ever meets twice."""


class Mask:
    """Turns values into keyed digests; equal values give equal ones.

    Args:
        key: at least 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._hmac = hmac.new(key, digestmod=hashlib.sha256)

    def text(self, value: str) -> str:
        """The digest of one value."""
        digest = self._hmac.copy()
        digest.update(value.encode())
        return digest.hexdigest()[:DIGEST_CHARACTERS]

    def column(self, values: pa.Array) -> pa.Array:
        """The digests of a column, as strings; null stays null. Each distinct value costs once."""
        coded = values.dictionary_encode()
        told = [None if v is None else self.text(spelled(v)) for v in coded.dictionary.to_pylist()]
        return pc.take(pa.array(told, pa.string()), coded.indices)


def spelled(value: object) -> str:
    """How a value is written before it is masked: a float32 is the shortest text that gives it."""
    if isinstance(value, float):
        return "nan" if value != value else repr(float(np.float32(value)))
    return str(value)


def open_mask(home: Path) -> Mask:
    """The mask of an installation; its key is made on first use, readable by its owner alone.

    Raises:
        ConfigurationError: the key file was cut off, or others may read it.
        StorageError: it cannot be written.
    """
    file = mask_key_file(home)
    if not file.exists():
        _make_key(file)
    if file.stat().st_mode & 0o077:
        raise ConfigurationError(
            f"{file} may be read by others (mode {file.stat().st_mode & 0o777:o}), expected 600: "
            "whoever has the key can find masked values by trying. Close it, or remove it to get a "
            "new key, after which new digests no longer match old ones"
        )
    try:
        key = bytes.fromhex(file.read_text(encoding="ascii").strip())
    except ValueError:
        key = b""
    if len(key) < KEY_BYTES:
        raise ConfigurationError(
            f"{file} holds {len(key)} bytes of a key, expected {KEY_BYTES} in hexadecimal; put the "
            "former file back, or remove it to get a new key. Nothing was logged"
        )
    return Mask(key)


def mask_key_file(home: Path) -> Path:
    """Where the key lies: beside the log, so that a copy of the log's parts lacks it."""
    return log_root(home) / "secrets" / "mask-key"


def _make_key(file: Path) -> None:
    """Write a new key aside and link it into place: the first of several processes wins."""
    private_folder(file.parent.parent)
    private_folder(file.parent)
    aside = file.with_name(f".{file.name}-{os.getpid()}-{secrets.token_hex(4)}")
    with refused_writes_explained(file):
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secrets.token_hex(KEY_BYTES).encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        try:
            os.link(aside, file)
        except FileExistsError:
            pass
        finally:
            aside.unlink()


def unknown_names(hidden: Iterable[str], known: Iterable[str]) -> list[str]:
    """Names that are to be hidden and that nothing bears."""
    return sorted(set(hidden) - set(known))
