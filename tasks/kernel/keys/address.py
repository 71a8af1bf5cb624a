"""The key store that an address names."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.keys.files import FileKeys
from tasks.kernel.keys.openbao import OpenBao, OpenBaoKeys
from tasks.kernel.keys.store import KeyStore
from tasks.kernel.tenants import tenant_of
from tasks.kernel.values import is_loopback

KEYS = "FALAJ_KEYS"
"""Variable with the address of a key store: a folder, file:///folder, or OpenBao, such as
https://host:8200 and behind it the path of its `transit` engine where that has another; without it
keys are files of the state folder."""
TOKEN_FILE, ADMIN_TOKEN_FILE = "FALAJ_KEYS_TOKEN_FILE", "FALAJ_KEYS_ADMIN_TOKEN_FILE"
CA = "FALAJ_KEYS_CA"


OWN = Path("openbao") / "client.json"
"""File of the state folder that has these variables where the platform runs OpenBao itself."""


def named_keys(home: Path, environment: Mapping[str, str] = os.environ) -> KeyStore | None:
    """The key store that the environment or the platform of a state folder names, if any.

    Raises:
        ConfigurationError: as `keys_at`; or a tenant is to sign with the keys of others.
    """
    own = own_openbao(home)
    if not environment.get(KEYS):
        environment = {**own, **environment}
    if not (address := environment.get(KEYS)):
        return None
    if address != own.get(KEYS):
        check_keys(home, address)
    return keys_at(address, environment)


def check_keys(home: Path, address: str) -> None:
    """See that a key store is of the tenant of a state folder alone.

    Raises:
        ConfigurationError: its address does not say so.
    """
    tenant, last = tenant_of(home), urlsplit(address).path.rstrip("/").rpartition("/")[2]
    if tenant and last not in (tenant, f"transit-{tenant}"):
        wanted = f"a `transit` engine or a folder of its own, .../transit-{tenant}"
        raise ConfigurationError(
            f"{KEYS} of the tenant {tenant} is {address}; expected {wanted}. Nothing was done"
        )


def own_openbao(home: Path) -> dict[str, str]:
    """The variables of the OpenBao that the platform of a state folder runs; none without one."""
    with suppress(FileNotFoundError):
        return dict(json.loads((home / OWN).read_text()))
    return {}


def keys_at(address: str, environment: Mapping[str, str] = os.environ) -> KeyStore:
    """The key store at an address.

    Args:
        address: see `KEYS`.
        environment: variables.

    Raises:
        ConfigurationError: it is no address of one, or no file with a token is named.
    """
    url = urlsplit(address)
    if url.scheme == "file" and not url.netloc and url.path.startswith("/"):
        return FileKeys(Path(unquote(url.path)))
    if url.scheme != "https" and not (url.scheme == "http" and is_loopback(url.hostname or "")):
        wanted = "https://host:8200, http on 127.0.0.1 alone, or file:///folder"
        raise ConfigurationError(f"{KEYS} is {address}; expected {wanted}. Nothing was signed")
    if not (token_file := environment.get(TOKEN_FILE)):
        wanted = "a file with a token of OpenBao, or with an AppRole's role id and secret id"
        raise ConfigurationError(f"{TOKEN_FILE} is not set; expected {wanted}. Nothing was signed")
    return _opened(address, token_file, environment.get(CA), environment.get(ADMIN_TOKEN_FILE))


@cache
def _opened(address: str, token_file: str, ca: str | None, admin: str | None) -> OpenBaoKeys:
    """One for all of a process, since it knows the public keys."""
    url = urlsplit(address)
    base, authority = f"{url.scheme}://{url.netloc}", Path(ca) if ca else None
    bao = OpenBao(base, Path(token_file), authority)
    administrator = OpenBao(base, Path(admin), authority) if admin else None
    return OpenBaoKeys(bao, administrator, url.path.strip("/") or "transit")
