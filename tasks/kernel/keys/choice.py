"""Which key store an installation has."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.keys.files import FileKeys
from tasks.kernel.keys.openbao import OpenBao, OpenBaoKeys
from tasks.kernel.keys.store import KeyStore
from tasks.kernel.location import is_loopback

KEYS = "FALAJ_KEYS"
"""Variable with the address of OpenBao, such as https://host:8200, and behind it the path of its
`transit` engine where that has another; without it keys are files of the state folder."""
TOKEN_FILE, ADMIN_TOKEN_FILE = "FALAJ_KEYS_TOKEN_FILE", "FALAJ_KEYS_ADMIN_TOKEN_FILE"
CA = "FALAJ_KEYS_CA"
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
    address, token_file = env.get(KEYS), env.get(TOKEN_FILE)
    if not address:
        return FileKeys(home / "keyring")
    url = urlsplit(address)
    if url.scheme != "https" and not (url.scheme == "http" and is_loopback(url.hostname or "")):
        raise ConfigurationError(
            f"{KEYS} is {address}; expected https://host:8200, or http on 127.0.0.1 alone. Nothing "
            "was signed"
        )
    if not token_file:
        raise ConfigurationError(
            f"{TOKEN_FILE} is not set; expected a file with a token of OpenBao at {address}, or "
            "with an AppRole's role id and secret id. Nothing was signed"
        )
    return _opened(address, token_file, env.get(CA), env.get(ADMIN_TOKEN_FILE))


def own_openbao(home: Path) -> dict[str, str]:
    """The variables of the OpenBao that the platform of a state folder runs; none without one."""
    with suppress(FileNotFoundError):
        return dict(json.loads((home / OWN).read_text()))
    return {}


@cache
def _opened(address: str, token_file: str, ca: str | None, admin: str | None) -> OpenBaoKeys:
    """One for all of a process, since it knows the public keys."""
    url = urlsplit(address)
    base, authority = f"{url.scheme}://{url.netloc}", Path(ca) if ca else None
    bao = OpenBao(base, Path(token_file), authority)
    administrator = OpenBao(base, Path(admin), authority) if admin else None
    return OpenBaoKeys(bao, administrator, url.path.strip("/") or "transit")
