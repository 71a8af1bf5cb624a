"""Backups into a location and prunes of it take turns, on whatever machines they run.

A place of backups may have no database with locks, so each writes its name and a moment into one
object of the location, again and again. One that was killed does not: after a while it counts no
more. One that was taken for killed finds its name gone, and ends before it relies on anything.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Literal, Protocol

from tasks.kernel.errors import StorageError, TransientError
from tasks.kernel.location import Location
from tasks.metadata.database import held_everywhere

LOCK = "backups.lock"
KILLED_AFTER_S = {"backup": 86_400, "prune": 3600}
"""Without a sign. A backup gives none while it sends one file, which may take hours."""
USED = "used.lock"
SIGN_EVERY_S = 60


class Sign(Protocol):
    """Gives a sign where one is due, or at once; before a step, and before what must be sure."""

    def __call__(self, *, now: bool = False) -> None:
        """Give it."""


def in_use(home: Path) -> AbstractContextManager[list[int]]:
    """Keep prunes of all machines out while a run uses the state; one at work is waited for."""
    return held_everywhere(home / USED, shared=True)


@contextmanager
def under_way(location: Location, kind: Literal["backup", "prune"]) -> Iterator[Sign]:
    """Keep prunes out while a backup is made, and everybody while a prune removes.

    Raises:
        TransientError: others are at work, or took this one for killed; also when a sign is given.
    """
    me, signed = f"{kind} of {socket.gethostname()}, {secrets.token_hex(4)}", time.monotonic()

    def change(*, first: bool = False, last: bool = False) -> None:
        def noted(old: bytes | None) -> bytes:
            now, there = time.time(), json.loads(old or b"{}")
            there = {n: at for n, at in there.items() if now - at < KILLED_AFTER_S[n.split()[0]]}
            mine = there.pop(me, None)
            other = next((n for n in there if "prune" in (kind, n.split()[0])), None)
            if not last and (other or not (first or mine)):
                raise TransientError(
                    f"{location.url}: a {other or 'prune'} is or was under way, expected none "
                    f"beside this {kind}. This one ended, and what it did is whole; run it again "
                    "when the other has ended. Of one that was killed, a prune counts for an hour, "
                    f"a backup for a day; then or without {location.url}/{LOCK} nothing waits"
                )
            return json.dumps(there if last else {**there, me: now}).encode()

        location.change(LOCK, noted)

    def sign(*, now: bool = False) -> None:
        nonlocal signed
        if now or time.monotonic() - signed >= SIGN_EVERY_S:
            signed = time.monotonic()
            change()

    change(first=True)
    try:
        yield sign
    finally:
        with suppress(TransientError, StorageError):  # then it counts as killed after a while
            change(last=True)
