"""`x-forwarded-client-cert`, in which Envoy says whose certificate the client has shown."""

from __future__ import annotations

import re

from serving.errors import UnauthorizedError

_SUBJECT = re.compile(r'(?:^|;)Subject="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


def subject_of(value: str) -> str:
    r"""Subject of the certificate, as RFC 2253 writes it.

    The edge sets the header anew (`SANITIZE_SET`), so it has one element and one subject. Its
    backslashes are those of RFC 2253 and stay: without them a common name with a comma in it,
    `CN=batch\,O=acme`, would be taken for the two names `CN=batch,O=acme`.

    Raises:
        UnauthorizedError: it names none or several.
    """
    found = _SUBJECT.findall(value)
    if len(found) != 1 or not found[0]:
        raise UnauthorizedError("the edge named no subject of a certificate, or several")
    return str(found[0])
