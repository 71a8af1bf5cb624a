"""Tokens for tests: keys over HTTP on loopback, and a signature as attackers make it."""

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.utils import base64url_encode

from infra.bench.serving.installation import AUDIENCE as AUDIENCE
from infra.bench.serving.installation import Signer
from tests.support.services.listeners import Answer, Asked, http_listener, json_answer


def forged_tokens(signer: Signer, role: str) -> list[str]:
    """Tokens that nobody issued, as attackers make them of one that is good."""
    header, body, signature = signer.token(role).split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    more = base64url_encode(json.dumps(claims | {"roles": ["admin:*"]}).encode()).decode()
    return [
        signer.token(role, key=ec.generate_private_key(ec.SECP256R1())),
        jwt.encode(claims, None, algorithm="none", headers={"kid": signer.kid}),
        _signed_with_public_key(claims, signer.key, signer.kid),
        f"{header}.{more}.{signature}",
        f"{header}.{body}.{signature[:-4]}AAAA",
        f"{header}.{body}.",
        f"{header}.{body}",
        "garbage",
    ]


def _signed_with_public_key(claims: dict[str, Any], key: Any, kid: str) -> str:
    """A token whose secret is the issuer's public key, as attackers make it for weak readers."""
    secret = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    parts = ({"alg": "HS256", "typ": "JWT", "kid": kid}, claims)
    text = b".".join(base64url_encode(json.dumps(part).encode()) for part in parts)
    signature = hmac.new(secret, text, hashlib.sha256).digest()
    return (text + b"." + base64url_encode(signature)).decode()


def issued(signer: Signer, asked: Asked) -> Answer:
    """What an issuer publishes: where it is asked, and its keys."""
    names = ("authorization_endpoint", "token_endpoint", "jwks_uri")
    places = {name: f"{signer.issuer}/{name}" for name in names}
    if asked.path == "/.well-known/openid-configuration":
        return json_answer({"issuer": signer.issuer, **places})
    known = asked.path == "/jwks_uri"
    return json_answer(json.loads(signer.keys()) if known else None, 200 if known else 404)


@contextmanager
def published(signer: Signer) -> Iterator[str]:
    """Serve a signer's keys; yields their address."""

    def answer(asked: Asked) -> Answer:
        signer.asked += 1
        return 200, "application/json", signer.keys().encode()

    with http_listener(answer) as url:
        yield f"{url}/keys"
