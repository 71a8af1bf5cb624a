"""An OIDC issuer for tests: discovery and keys over HTTP on loopback, tokens signed with RS256."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

from infra.bench.serving.installation import Signer
from tests.support.services.listeners import http_listener
from tests.support.services.signing import issued

AUDIENCE = "feast"


def new_key() -> RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@dataclass
class Issuer(Signer):
    """A running issuer whose keys are of the one kind that Feast takes."""

    key: RSAPrivateKey = field(default_factory=new_key)

    @property
    def environment(self) -> dict[str, str]:
        """What makes our servers accept its tokens."""
        return {
            "FALAJ_OIDC_DISCOVERY_URL": f"{self.issuer}/.well-known/openid-configuration",
            "FALAJ_OIDC_AUDIENCE": AUDIENCE,
            "FALAJ_OIDC_ISSUER": self.issuer,
        }

    def keys(self) -> str:
        """The published key as a JWKS."""
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))
        return json.dumps({"keys": [{**public, "kid": self.kid, "use": "sig", "alg": "RS256"}]})

    def token(self, *roles: str, alg: str = "RS256", **claims: Any) -> str:
        """As `Signer.token`, for Feast's server."""
        usual = {"aud": AUDIENCE, "sub": "-".join(["somebody", *roles])}
        return super().token(*roles, alg=alg, **(usual | claims))


@contextmanager
def issuer() -> Iterator[Issuer]:
    """Start an issuer with a new key."""
    made = Issuer()
    with http_listener(lambda asked: issued(made, asked)) as made.issuer:
        yield made
