"""The key store that an address names."""

from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.keys.files import FileKeys
from tasks.kernel.keys.store import KeyStore

KEYS = "FALAJ_KEYS"
"""Variable with the address of a key store; without it keys are files of the state folder."""


@cache
def keys_at(address: str) -> KeyStore:
    """The key store at an address.

    Raises:
        ConfigurationError: it is no address of one.
    """
    parts = urlsplit(address)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return FileKeys(Path(unquote(parts.path)))
    raise ConfigurationError(
        f"{KEYS} is {parts.scheme}://{parts.hostname or ''}{parts.path}; expected file:///folder. "
        "Nothing was signed"
    )
