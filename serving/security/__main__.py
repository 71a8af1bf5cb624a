"""API keys and certificates: `python -m serving.security keys|certificates`.

    keys create --subject nightly --role infer:flight-delay [--tenant acme] [--days 90]
    keys list
    keys revoke ID
    certificates --host serving.example.org [--host 10.0.0.5]

A key is printed once, alone on standard output. Exit codes: 0 done; 2 wrong input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from serving.security.certificates import ensure_authority, ensure_certificate, expires_at
from serving.security.config import Grant
from serving.security.keys import create_key, read_keys, revoke_key
from tasks.kernel.errors import ConfigurationError, FalajError
from tasks.kernel.settings import Settings

KEYS = Path("serving") / "secrets" / "api-keys.json"
CERTIFICATES = Path("serving") / "secrets" / "tls"
EXIT_WRONG_INPUT = 2
ROLE_HELP = "action and model, as infer:flight-delay or read:*; may be repeated"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    home = (options.home or Settings.from_environment().home).expanduser().resolve()
    try:
        options.run(home, options)
    except (FalajError, ValidationError) as exc:
        sys.stderr.write(f"refused: {exc}\n")
        return EXIT_WRONG_INPUT
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serving.security",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--home", type=Path, help="state folder (default: .falaj, or FALAJ_HOME)")
    parts = parser.add_subparsers(dest="part", required=True)
    keys = parts.add_parser("keys", help="API keys")
    keys.add_argument("--file", type=Path, help=f"default: {KEYS} in the state folder")
    commands = keys.add_subparsers(dest="command", required=True)
    create = commands.add_parser("create", help="make a key, and print it once")
    create.add_argument("--subject", required=True, help="whom it is for")
    create.add_argument("--role", action="append", required=True, help=ROLE_HELP)
    create.add_argument(
        "--tenant",
        default="",
        help="it is refused models of other tenants (default: none; an operator's, which may ask "
        "whatever its roles name)",
    )
    create.add_argument("--days", type=float, help="how long it is valid (default: for ever)")
    create.set_defaults(run=_create)
    commands.add_parser("list", help="all keys").set_defaults(run=_list)
    revoke = commands.add_parser("revoke", help="refuse a key within a second")
    revoke.add_argument("id", help="as `list` shows it")
    revoke.set_defaults(run=_revoke)
    certificates = parts.add_parser("certificates", help="a certificate of a private authority")
    certificates.add_argument(
        "--host", action="append", required=True, help="name or address of clients; may be repeated"
    )
    certificates.set_defaults(run=_certificates)
    return parser


def _grant(text: str) -> str:
    try:
        return TypeAdapter(Grant).validate_python(text)
    except ValidationError as exc:
        raise ConfigurationError(
            f"{text!r} is no role; write infer, read or admin, a colon, and a model or *, as "
            "infer:flight-delay. No key was made"
        ) from exc


def _create(home: Path, options: argparse.Namespace) -> None:
    expires = datetime.now(UTC) + timedelta(days=options.days) if options.days else None
    text, key = create_key(
        options.file or home / KEYS,
        options.subject,
        tuple(map(_grant, options.role)),
        options.tenant,
        expires,
    )
    sys.stderr.write(f"key {key.id} for {key.subject}; it is not shown again\n")
    sys.stdout.write(text + "\n")


def _list(home: Path, options: argparse.Namespace) -> None:
    now = datetime.now(UTC)
    for key in read_keys(options.file or home / KEYS):
        until = f"until {key.expires:%Y-%m-%d}" if key.expires else "for ever"
        grants = " ".join(key.grants)
        tenant = key.tenant or "-"
        line = f"{key.id}  {key.state(now):<8}{until:<18}{key.subject:<20}{tenant:<12}{grants}\n"
        sys.stdout.write(line)


def _revoke(home: Path, options: argparse.Namespace) -> None:
    key = revoke_key(options.file or home / KEYS, options.id)
    sys.stdout.write(f"key {key.id} of {key.subject} is refused from now on\n")


def _certificates(home: Path, options: argparse.Namespace) -> None:
    folder = home / CERTIFICATES
    authority = ensure_authority(folder, "authority")
    pair = ensure_certificate(folder, "server", authority, options.host, "server")
    sys.stdout.write(
        f"certificate  {pair.certificate} (until {expires_at(pair.certificate):%Y-%m-%d})\n"
        f"key          {pair.key}\n"
        f"authority    {authority.certificate}; clients trust this one\n"
    )


if __name__ == "__main__":
    sys.exit(main())
