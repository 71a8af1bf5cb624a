"""Which key store an installation has, and whose signatures it trusts."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.keys.address import KEYS, keys_at
from tasks.kernel.keys.files import FileKeys
from tasks.kernel.keys.store import IMPORTS, KeyStore
from tasks.kernel.settings import bring, claim, is_shared

OWN = Path("openbao") / "client.json"
"""File of the state folder that has these variables where the platform runs OpenBao itself."""
TRUSTED = "FALAJ_TRUSTED_KEYS"
"""Variable with a folder of public keys, `<name>/<id>.pub`, that alone are trusted. Whoever writes
the state can add a key to it; this folder may be of somebody else, and read-only."""


def key_store(home: Path, environment: Mapping[str, str] | None = None) -> KeyStore:
    """The key store of an installation.

    Args:
        home: its state folder.
        environment: default: this process's; what it says goes before the platform's own.

    Raises:
        ConfigurationError: the address is none, or no file with a token is named.
    """
    env = os.environ if environment is None else environment
    if not env.get(KEYS):
        env = {**own_openbao(home), **env}
    if address := env.get(KEYS):
        return keys_at(address, env)
    folder = home / "keyring"
    return FileKeys(folder, bring, claim, lambda: is_shared(folder))


def own_openbao(home: Path) -> dict[str, str]:
    """The variables of the OpenBao that the platform of a state folder runs; none without one."""
    with suppress(FileNotFoundError):
        return dict(json.loads((home / OWN).read_text()))
    return {}


def trusted_keys(
    home: Path, name: str, environment: Mapping[str, str] | None = None
) -> Mapping[str, bytes]:
    """PEM of the public keys, by id, that signatures are checked with.

    Args:
        home: the state folder; its own keys are trusted where `FALAJ_TRUSTED_KEYS` is not set.
        name: of the key.
        environment: default: this process's.

    Raises:
        ConfigurationError: the folder of that variable holds no such key.
    """
    env = os.environ if environment is None else environment
    if not (folder := env.get(TRUSTED)):
        own = FileKeys(home / "keyring") if name == IMPORTS else key_store(home, env)
        return own.public_keys(name)
    if not (found := FileKeys(Path(folder).expanduser()).public_keys(name)):
        raise ConfigurationError(
            f"{TRUSTED} is {folder}, which has no {name}/*.pub; copy there those that you trust"
        )
    return found
