"""Guards with one issuer of tokens, whose keys and clock a test holds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving.security.config import SecurityConfig
from serving.security.guard import SecurityGuard
from tests.support.services.signing import AUDIENCE, Signer

ISSUER = "https://issuer.test"
TLS = {"certificate": "c", "key": "k", "client_ca": "a"}
BEHIND_EDGE: dict[str, Any] = {"behind_edge": True, "tls": TLS}
PLENTY = {"client": {"per_s": 1e6, "burst": 10**6}}


def guard_of(
    keys: str,
    clock: Callable[[], float] = lambda: 1000.0,
    issuer: dict[str, Any] | None = None,
    **config: Any,
) -> SecurityGuard:
    """A guard with one issuer whose keys are there, and limits that nobody reaches."""
    known = {"issuer": ISSUER, "audience": AUDIENCE, "keys": keys} | (issuer or {})
    content = {"issuers": [known], "limits": PLENTY} | config
    return SecurityGuard(SecurityConfig.model_validate(content), clock)


class World:
    """An issuer of tokens, a clock, and guards that know both."""

    now = 1000.0

    def __init__(self, folder: Path, signer: Signer | None = None) -> None:
        self.folder, self.signer = folder, signer or Signer(ISSUER)

    def guard(self, issuer: dict[str, Any] | None = None, **config: Any) -> SecurityGuard:
        """Keywords change what is known of the issuer, or the configuration."""
        keys = self.folder / "keys.json"
        keys.write_text(self.signer.keys())
        return guard_of(str(keys), lambda: self.now, issuer, **config)
