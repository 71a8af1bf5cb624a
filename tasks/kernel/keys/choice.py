"""Which key store an installation has."""

import os
from collections.abc import Mapping
from pathlib import Path

from tasks.kernel.keys.address import KEYS, keys_at
from tasks.kernel.keys.files import FileKeys
from tasks.kernel.keys.store import KeyStore
from tasks.kernel.settings import bring, claim


def key_store(home: Path, environment: Mapping[str, str] | None = None) -> KeyStore:
    """The key store of an installation.

    Args:
        home: its state folder.
        environment: default: this process's.
    """
    address = (os.environ if environment is None else environment).get(KEYS)
    return keys_at(address) if address else FileKeys(home / "keyring", bring, claim)
