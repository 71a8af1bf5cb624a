"""Issuers of tokens for tests: keys that can be rotated, in a file or over HTTP on loopback."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.utils import base64url_encode

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

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            signer.asked += 1
            body = signer.keys().encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/keys"
        finally:
            server.shutdown()
            thread.join()
