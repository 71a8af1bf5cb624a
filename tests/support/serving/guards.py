"""Guards with one issuer of tokens, whose keys and clock a test holds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving.errors import ForbiddenError, TooManyRequestsError, UnauthorizedError
from serving.interfaces import Action, Headers, Principal
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


class StrictGuard:
    """Knows who says `x-who`, and of them admits `me` alone, and not too often."""

    def __init__(self) -> None:
        self.asked: list[tuple[Action, str | None]] = []

    def recognise(self, headers: Headers, address: str) -> None:
        assert address == "127.0.0.1"
        if b"x-who" not in dict(headers):
            raise UnauthorizedError("nobody")

    def admit(self, headers: Headers, address: str, action: Action, model: str | None) -> Principal:
        self.asked.append((action, model))
        assert address == "127.0.0.1"
        who = dict(headers).get(b"x-who")
        if who == b"broken":
            raise LookupError("a fault of ours")
        if who == b"often":
            raise TooManyRequestsError("come later", 2.2)
        if who != b"me":
            raise ForbiddenError("not you")
        return Principal("me", "", {"*": frozenset({action})}, 1e12)
