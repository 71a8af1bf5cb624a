"""Headers that every answer of a serving process carries, and those of a refusal."""

from __future__ import annotations

import math
from http import HTTPStatus

from serving.errors import ServingError

Header = tuple[bytes, bytes]

SECURITY_HEADERS: tuple[Header, ...] = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"strict-transport-security", b"max-age=31536000"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)
"""For answers to programs. A page for people needs a content policy of its own."""
CHALLENGE: Header = (b"www-authenticate", b'Bearer realm="falaj"')


def refusal_headers(error: ServingError) -> list[Header]:
    """`WWW-Authenticate` of a 401, and `Retry-After` (whole seconds) where trying again helps."""
    headers = [CHALLENGE] if error.status == HTTPStatus.UNAUTHORIZED else []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    return headers
