"""An issuer of tokens, whose keys can be rotated."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

AUDIENCE = "falaj"


@dataclass
class Signer:
    """Signs tokens with ES256; its public keys are those in `published`."""

    issuer: str
    kid: str = "one"
    key: Any = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    published: dict[str, Any] = field(default_factory=dict)
    asked: int = 0

    def __post_init__(self) -> None:
        self.published.setdefault(self.kid, self.key)

    def rotate(self, kid: str) -> None:
        """Sign with a new key; the old ones are not published any more."""
        self.kid, self.key = kid, ec.generate_private_key(ec.SECP256R1())
        self.published = {kid: self.key}

    def keys(self) -> str:
        """The published keys as a JWKS."""
        entries = [
            json.loads(jwt.algorithms.ECAlgorithm.to_jwk(key.public_key()))
            | {"kid": kid, "alg": "ES256", "use": "sig"}
            for kid, key in self.published.items()
        ]
        return json.dumps({"keys": entries})

    def token(
        self,
        *roles: str,
        key: Any = None,
        alg: str = "ES256",
        kid: str | None = None,
        **claims: Any,
    ) -> str:
        """A token; claims that are None are left out."""
        now = int(time.time())
        content = {
            "iss": self.issuer,
            "aud": AUDIENCE,
            "sub": "somebody",
            "iat": now,
            "exp": now + 600,
            "roles": list(roles),
        } | claims
        content = {name: value for name, value in content.items() if value is not None}
        signing = self.key if key is None else key
        return jwt.encode(content, signing, algorithm=alg, headers={"kid": kid or self.kid})
