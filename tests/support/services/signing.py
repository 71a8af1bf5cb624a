"""Tokens for tests: keys over HTTP on loopback, and a signature as attackers make it."""

import hashlib
import hmac
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.utils import base64url_encode

from infra.bench.serving.installation import AUDIENCE as AUDIENCE
from infra.bench.serving.installation import Signer
from tests.support.services.listeners import Answer, Asked, http_listener


def signed_with_public_key(claims: dict[str, Any], key: Any, kid: str) -> str:
    """A token whose secret is the issuer's public key, as attackers make it for weak readers."""
    secret = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    parts = ({"alg": "HS256", "typ": "JWT", "kid": kid}, claims)
    text = b".".join(base64url_encode(json.dumps(part).encode()) for part in parts)
    signature = hmac.new(secret, text, hashlib.sha256).digest()
    return (text + b"." + base64url_encode(signature)).decode()


@contextmanager
def published(signer: Signer) -> Iterator[str]:
    """Serve a signer's keys; yields their address."""

    def answer(asked: Asked) -> Answer:
        signer.asked += 1
        return 200, "application/json", signer.keys().encode()

    with http_listener(answer) as url:
        yield f"{url}/keys"
