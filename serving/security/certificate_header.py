"""`x-forwarded-client-cert`, in which Envoy says whose certificate the client has shown."""

from __future__ import annotations

import re

from serving.errors import UnauthorizedError

_SUBJECT = re.compile(r'(?:^|;)Subject="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


def subject_of(value: str) -> str:
    """Subject of the certificate, as RFC 2253 writes it.

    The edge sets the header anew (`SANITIZE_SET`), so it has one element and one subject.

    Raises:
        UnauthorizedError: it names none or several.
    """
    found = _SUBJECT.findall(value)
    if len(found) != 1 or not found[0]:
        raise UnauthorizedError("the edge named no subject of a certificate, or several")
    return re.sub(r"\\(.)", r"\1", found[0])
