"""Commands of API keys and certificates. A key is printed once, alone on standard output."""

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from falaj.context import Here
from serving.security.keys import create_key, read_keys, revoke_key
from tasks.kernel.errors import ConfigurationError

KEYS = Path("serving") / "secrets" / "api-keys.json"
CERTIFICATES = Path("serving") / "secrets" / "tls"
File = Annotated[Path | None, Parameter(help=f"Of keys (default: {KEYS} in the state folder).")]
app = App(name="keys")


@app.command
def create(
    *,
    subject: str,
    role: list[str],
    tenant: str = "",
    days: Annotated[float | None, Parameter(validator=Number(gt=0, lte=36_500))] = None,
    file: File = None,
    context: Here,
) -> None:
    """Create a key, and print it once.

    Args:
        subject: Who uses it.
        role: Action and model, as infer:flight-delay or read:*; may be repeated.
        tenant: The key has no access to models of other tenants (default: an operator's key, with
            access to whatever its roles name).
        days: How long it is valid, a century at most (default: for ever).
        file: Of keys (default: serving/secrets/api-keys.json in the state folder).
    """
    if not subject.strip():
        raise ConfigurationError("--subject is empty; name who uses the key. No key was made")
    expires = datetime.now(UTC) + timedelta(days=days) if days else None
    grants = tuple(map(_grant, role))
    text, key = create_key(file or context.home / KEYS, subject, grants, tenant, expires)
    sys.stderr.write(f"key {key.id} for {key.subject}; it is not shown again\n")
    sys.stdout.write(text + "\n")


def _grant(text: str) -> str:
    from pydantic import TypeAdapter, ValidationError

    from serving.security.config import Grant

    try:
        return TypeAdapter(Grant).validate_python(text)
    except ValidationError as exc:
        raise ConfigurationError(
            f"{text!r} is no role; write infer, read or admin, a colon, and a model or *, as "
            "infer:flight-delay. No key was made"
        ) from exc


@app.command(name="list")
def list_keys(*, file: File = None, context: Here) -> list[str]:
    """List all keys."""
    now = datetime.now(UTC)
    return [
        f"{key.id}  {key.state(now):<8}"
        f"{f'until {key.expires:%Y-%m-%d}' if key.expires else 'for ever':<18}"
        f"{key.subject:<20}{key.tenant or '-':<12}{' '.join(key.grants)}"
        for key in read_keys(file or context.home / KEYS)
    ]


@app.command
def revoke(id: str, /, *, file: File = None, context: Here) -> list[str]:
    """Revoke a key: it is refused within a second.

    Args:
        id: As `list` shows it.
        file: Of keys (default: serving/secrets/api-keys.json in the state folder).
    """
    key = revoke_key(file or context.home / KEYS, id)
    return [f"key {key.id} of {key.subject} is refused from now on"]


def certificates(*, host: list[str], context: Here) -> list[str]:
    """Issue a certificate of a private authority.

    Args:
        host: Name or address of clients; may be repeated.
    """
    from serving.security.certificates import ensure_authority, ensure_certificate, expires_at

    folder = context.home / CERTIFICATES
    authority = ensure_authority(folder, "authority")
    pair = ensure_certificate(folder, "server", authority, host, "server")
    return [
        f"certificate  {pair.certificate} (until {expires_at(pair.certificate):%Y-%m-%d})",
        f"key          {pair.key}",
        f"authority    {authority.certificate}; clients trust this one",
    ]
