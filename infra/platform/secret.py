"""The platform's password: made once, kept in a file that only its owner can read."""

from __future__ import annotations

import os
import secrets

from infra.orchestration.client import read_password
from infra.platform.config import Place
from tasks.kernel.errors import refused_writes_explained
from tasks.kernel.settings import write_atomically

USER = "admin"
SECRET_MODE = 0o600
NUM_BYTES = 18


def ensure_password(place: Place) -> tuple[str, bool]:
    """The line `user:password`, and whether it was made just now.

    A file that others may read is closed to them.
    """
    kept = read_password(place.folder)
    if kept:
        if place.secret.stat().st_mode & 0o077:
            place.secret.chmod(SECRET_MODE)
        return kept, False
    made = f"{USER}:{secrets.token_urlsafe(NUM_BYTES)}"
    previous = os.umask(0o077)  # the file must not be readable by others even for a moment
    try:
        with refused_writes_explained(place.secret):
            write_atomically(place.secret, made + "\n")
    finally:
        os.umask(previous)
    return made, True
