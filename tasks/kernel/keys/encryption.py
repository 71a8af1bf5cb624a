"""Whether what is written is encrypted, and by which key."""

from collections.abc import Mapping
from functools import cache

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.keys.address import KEYS, keys_at
from tasks.kernel.keys.envelope import Envelopes

ENCRYPTION = "FALAJ_ENCRYPTION"
"""Variable with the name of the key that encrypts; without it nothing is encrypted."""


def encryption(environment: Mapping[str, str]) -> Envelopes | None:
    """How this process encrypts; None: not at all.

    Raises:
        ConfigurationError: no key store is named, so that the keys would lie beside what they
            encrypt.
    """
    name = environment.get(ENCRYPTION)
    return _envelopes(name, environment.get(KEYS, "")) if name else None


@cache
def _envelopes(name: str, address: str) -> Envelopes:
    if not address:
        raise ConfigurationError(
            f"{ENCRYPTION} is {name}, and {KEYS} is not set: keys would lie beside what they "
            "encrypt. Name OpenBao, or a folder elsewhere (file:///folder). Nothing was written"
        )
    return Envelopes(keys_at(address), name)
