"""Whether what is written is encrypted, and by which key."""

from collections.abc import Mapping

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
    if not (name := environment.get(ENCRYPTION)):
        return None
    if not (address := environment.get(KEYS)):
        raise ConfigurationError(
            f"{ENCRYPTION} is {name}, and {KEYS} is not set: keys would lie beside what they "
            "encrypt. Name OpenBao, or a folder elsewhere (file:///folder). Nothing was written"
        )
    return Envelopes(keys_at(address), name)
