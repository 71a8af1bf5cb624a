"""Which key store an installation has."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tasks.kernel.keys.address import KEYS, keys_at
from tasks.kernel.keys.files import FileKeys
from tasks.kernel.keys.store import KeyStore
from tasks.kernel.settings import bring, claim, is_shared

OWN = Path("openbao") / "client.json"
"""File of the state folder that has these variables where the platform runs OpenBao itself."""


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
