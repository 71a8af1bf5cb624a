"""An OIDC issuer for tests: discovery and keys over HTTP on loopback, tokens signed with RS256."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from tests.support.services.listeners import Answer, Asked, http_listener, json_answer

AUDIENCE = "feast"
KEY_ID = "key-1"


@dataclass(frozen=True)
class Issuer:
    """A running issuer; its tokens say what they are told to."""

    url: str
    key: RSAPrivateKey

    @property
    def environment(self) -> dict[str, str]:
        """What makes our servers accept its tokens."""
        return {
            "FALAJ_OIDC_DISCOVERY_URL": f"{self.url}/.well-known/openid-configuration",
            "FALAJ_OIDC_AUDIENCE": AUDIENCE,
            "FALAJ_OIDC_ISSUER": self.url,
        }

    def token(self, *roles: str, key: Any = None, algorithm: str = "RS256", **claims: Any) -> str:
        """A token with these roles; claims that are None are left out."""
        now = int(time.time())
        content = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "-".join(["somebody", *roles]),
            "iat": now,
            "exp": now + 600,
            "roles": list(roles),
            **claims,
        }
        content = {name: value for name, value in content.items() if value is not None}
        signing = self.key if key is None else key
        return jwt.encode(content, signing, algorithm=algorithm, headers={"kid": KEY_ID})


def new_key() -> RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@contextmanager
def issuer() -> Iterator[Issuer]:
    """Start an issuer with a new key."""
    key = new_key()
    public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key()))
    keys = {"keys": [{**public, "kid": KEY_ID, "use": "sig", "alg": "RS256"}]}

    def answer(asked: Asked) -> Answer:
        here = f"http://{asked.headers['host']}"
        documents = {
            "/.well-known/openid-configuration": {
                "issuer": here,
                "jwks_uri": f"{here}/keys",
                "token_endpoint": f"{here}/token",
                "authorization_endpoint": f"{here}/authorize",
            },
            "/keys": keys,
        }
        document = documents.get(asked.path)
        return json_answer(document, 200 if document else 404)

    with http_listener(answer) as url:
        yield Issuer(url, key)
