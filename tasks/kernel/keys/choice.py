"""Which key store an installation has."""

import os
from collections.abc import Mapping
from pathlib import Path

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.keys.files import FileKeys
from tasks.kernel.keys.store import KeyStore

KEYS = "FALAJ_KEYS"
"""Variable with the address of a key store; without it keys are files of the state folder."""


def key_store(home: Path, environment: Mapping[str, str] | None = None) -> KeyStore:
    """The key store of an installation.

    Args:
        home: its state folder.
        environment: default: this process's.
    """
    address = (os.environ if environment is None else environment).get(KEYS)
    if not address:
        return FileKeys(home / "keyring")
    raise ConfigurationError(f"{KEYS} is {address}; expected no address. Nothing was signed")
