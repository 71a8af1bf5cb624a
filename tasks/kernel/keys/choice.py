"""Which key store an installation has, and whose signatures it trusts."""

import os
from collections.abc import Mapping
from pathlib import Path

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.keys.address import named_keys
from tasks.kernel.keys.files import FileKeys
from tasks.kernel.keys.store import IMPORTS, KeyStore
from tasks.kernel.settings import bring, claim, is_shared

TRUSTED = "FALAJ_TRUSTED_KEYS"
"""Variable with a folder of public keys, `<name>/<id>.pub`, that alone are trusted. Whoever writes
the state can add a key to it; this folder may be of somebody else, and read-only."""


def key_store(home: Path, environment: Mapping[str, str] = os.environ) -> KeyStore:
    """The key store of an installation.

    Args:
        home: its state folder.
        environment: variables; what they say goes before the platform's own.

    Raises:
        ConfigurationError: the address is none, or no file with a token is named.
    """
    folder = home / "keyring"
    files = FileKeys(folder, bring, claim, lambda: is_shared(folder))
    return named_keys(home, environment) or files


def trusted_keys(home: Path, name: str) -> Mapping[str, bytes]:
    """PEM of the public keys, by id, that signatures are checked with.

    Args:
        home: the state folder; its own keys are trusted where `FALAJ_TRUSTED_KEYS` is not set.
        name: of the key.

    Raises:
        ConfigurationError: the folder of that variable holds no such key.
    """
    if not (folder := os.environ.get(TRUSTED)):
        own, known = key_store(home), FileKeys(home / "keyring", bring).public_keys(name)
        # Other files may have become the key store since; OpenBao trusts its own keys alone.
        if isinstance(own, FileKeys):
            known = {**known, **own.public_keys(name)}
        return known if name == IMPORTS or isinstance(own, FileKeys) else own.public_keys(name)
    if not (found := FileKeys(Path(folder).expanduser()).public_keys(name)):
        raise ConfigurationError(
            f"{TRUSTED} is {folder}, which has no {name}/*.pub; copy there those that you trust"
        )
    return found
