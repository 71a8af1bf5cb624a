"""Tokens for tests: keys over HTTP on loopback, and a signature as attackers make it."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.utils import base64url_encode

from infra.bench.serving.gateway import AUDIENCE as AUDIENCE
from infra.bench.serving.gateway import Signer


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
