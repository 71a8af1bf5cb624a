"""Commands of encryption at rest: switch it on, see it, rotate its key, lock, destroy."""

from __future__ import annotations

import os
from typing import Annotated

from cyclopts import App, Parameter

from falaj.context import Here, Shown, acting, row
from tasks.governance.handling import variables
from tasks.governance.journal import Journal
from tasks.governance.policy import require_tls
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import scratch_folder
from tasks.kernel.keys import envelope
from tasks.kernel.keys.address import KEYS, check_keys, keys_at
from tasks.kernel.keys.encryption import ENCRYPTION
from tasks.kernel.location import Location
from tasks.kernel.settings import SERVER_FILE, Settings, server_environment
from tasks.kernel.tenants import tenant_of
from tasks.state.encrypted_folder import encrypt_password_again, encrypt_state, lock_state
from tasks.state.move import nobody_else

app = App(name="encryption")


def _key(context: Here) -> tuple[Settings, str, str]:
    """Settings, name and address of the key that encrypts.

    Raises:
        ConfigurationError: nothing is encrypted.
    """
    settings = context.settings
    acting(settings, "administer", None)
    name, keys = os.environ.get(ENCRYPTION), os.environ.get(KEYS)
    if not name or not keys:
        raise ConfigurationError(
            f"{settings.home} is not encrypted; `falaj encryption enable --keys ADDRESS` does it"
        )
    return settings, name, keys


@app.command
def enable(
    *,
    keys: Annotated[str, Parameter(help="OpenBao, or file:///folder outside the state.")],
    name: Annotated[str, Parameter(help="Of the key (default: the tenant's, or state).")] = "",
    context: Here,
) -> Shown:
    """Encrypt the state folder and the location; from then on all that is written is encrypted.

    Keep a copy of the keys elsewhere: without them nothing can be read again. A call that was cut
    off goes on.

    Examples:
        falaj encryption enable --keys file:///root/falaj-keys
    """
    settings = Settings.from_environment()
    keys_at(keys)
    check_keys(settings.home, keys)
    acting(settings, "administer", None)
    name = name or tenant_of(settings.home) or "state"
    server = server_environment(settings.home / SERVER_FILE, os.environ)
    require_tls(variables(os.environ | server), {ENCRYPTION: name})
    folder, known = settings.home, settings.home.with_name(f"{settings.home.name}.encrypted")
    if folder.exists() and not folder.is_mount() and not known.exists():
        with nobody_else(folder):
            pass
    num_files = encrypt_state(folder, name, keys)
    os.environ |= {ENCRYPTION: name, KEYS: keys}
    num_objects = _encrypt_objects(settings.location) if settings.location else 0
    Journal(settings.home / "audit").append("encrypt", subject={"key": name}, files=num_files)
    facts = {"key": name, "files": num_files, "objects": num_objects}
    lines = [row("Encrypted", f"{num_files:,} files, {num_objects:,} objects by the key {name!r}")]
    return Shown(facts, [*lines, f"keep a copy of the keys of {keys}: nothing is readable without"])


@app.command
def rotate(*, context: Here) -> Shown:
    """Make a new version of the key; servers use it within ten minutes, and lose no answer.

    Examples:
        falaj encryption rotate
    """
    settings, name, keys = _key(context)
    keys_at(keys).rotate(name)
    encrypt_password_again(settings.home)
    Journal(settings.home / "audit").append("rotate-key", subject={"key": name})
    return Shown({"key": name}, [row("Rotated", f"{name!r}; its older versions go on decrypting")])


@app.command
def lock(*, context: Here) -> Shown:
    """Unmount the state folder; the next command mounts it again, if it can have the key.

    Examples:
        falaj encryption lock
    """
    settings, name, _ = _key(context)
    lock_state(settings.home)
    return Shown({"key": name}, [row("Locked", settings.home)])


@app.command
def destroy(*, context: Here) -> Shown:
    """Destroy the key: all that it encrypted, backups too, is unreadable for good.

    Examples:
        falaj encryption destroy --yes
    """
    settings, name, keys = _key(context)
    context.confirm(f"Nobody will ever read what the key {name!r} encrypted. Destroy it?")
    with nobody_else(settings.home):
        Journal(settings.home / "audit").append("destroy-key", subject={"key": name})
    keys_at(keys).destroy(name)
    lock_state(settings.home)
    return Shown({"key": name}, [row("Destroyed", name)])


def _encrypt_objects(location: Location) -> int:
    """Encrypt what was written to a location before encryption was on."""
    plain, number = Location(location.url, location.access, plain=True), 0
    for stored in plain.entries(""):
        beginning = plain.read(stored, 0, envelope.HEADER_BYTES)
        if beginning is not None and not envelope.is_envelope(beginning):
            with scratch_folder("falaj-encrypt") as folder:
                plain.bring(stored, folder / "object")
                location.write(stored, folder / "object")
            number += 1
    return number
