"""Where feature servers listen and whose tokens they take: checked before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tasks.features.access.addresses import is_loopback
from tasks.kernel.errors import ConfigurationError

REQUIRED = {
    "auth_discovery_url": "FALAJ_OIDC_DISCOVERY_URL",
    "audience": "FALAJ_OIDC_AUDIENCE",
    "issuer": "FALAJ_OIDC_ISSUER",
}


@dataclass(frozen=True)
class Listening:
    """Where a server listens, and its certificate."""

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None

    def check(self) -> None:
        """Refuse to take tokens unencrypted from other machines.

        Raises:
            ConfigurationError: the address is not loopback and there is no certificate and key.
        """
        if bool(self.certificate) != bool(self.key):
            raise ConfigurationError(
                "a certificate needs its key and a key its certificate (--tls-cert, --tls-key). "
                "Nothing was started"
            )
        if not self.certificate and not is_loopback(self.host):
            raise ConfigurationError(
                f"listening on {self.host} would take tokens and give features unencrypted; "
                "expected a loopback address, or --tls-cert and --tls-key. Nothing was started"
            )


def oidc_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Feast's section `auth`, from the environment.

    Audience and issuer are asked for because Feast checks neither unless told to: a token that the
    same issuer made for any other service would open this one.

    Raises:
        ConfigurationError: a variable is not set, or the issuer's keys would come unencrypted.
    """
    missing = [name for name in REQUIRED.values() if not environment.get(name)]
    if missing:
        raise ConfigurationError(
            f"serving features needs {', '.join(missing)}, which name the OIDC issuer whose tokens "
            "are accepted; there is no serving without. Nothing was started"
        )
    settings = {"type": "oidc"} | {key: environment[name] for key, name in REQUIRED.items()}
    url = urlsplit(settings["auth_discovery_url"])
    if url.scheme != "https" and not is_loopback(url.hostname or ""):
        raise ConfigurationError(
            f"FALAJ_OIDC_DISCOVERY_URL reads the issuer's keys from {url.hostname} unencrypted; "
            "expected https. Nothing was started"
        )
    if client := environment.get("FALAJ_OIDC_CLIENT_ID"):
        settings["client_id"] = client  # where Keycloak puts roles: resource_access.<client>.roles
    return settings
