"""A mark inside the online store: the sign that it is the one that was filled.

It is written when a first materialization is complete, and compared before the ledger is believed.
A store that was removed, emptied, or restored from elsewhere lacks it or bears another, and is then
filled again with all of history.
"""

from __future__ import annotations

import secrets
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import redis

from tasks.features.access.presence import redis_client
from tasks.features.access.profile import read_profile
from tasks.kernel.errors import TransientError

MARKS = "falaj:marks"
"""Hash in Redis: project to mark."""

UNMARKED = 0
"""Of a store that can bear no mark: its ledger is believed."""


def new_mark() -> int:
    """A number from 1 to 2^31 - 1, as SQLite's header can hold it."""
    return secrets.randbelow(2**31 - 1) + 1


def read_mark(home: Path, repo: Path) -> int | None:
    """The online store's mark; None where it has none.

    Raises:
        TransientError: Redis does not answer.
    """
    profile = read_profile(home, repo)
    online = profile["online_store"]
    if "connection_string" in online:
        found = _ask_redis(online, "HGET", profile["project"])
    else:
        found = _read_sqlite(Path(online["path"])) if "path" in online else UNMARKED
    return None if found is None else int(found)


def write_mark(home: Path, repo: Path, mark: int) -> None:
    """Mark the online store.

    Raises:
        TransientError: the store does not answer or is locked.
    """
    profile = read_profile(home, repo)
    online = profile["online_store"]
    if "connection_string" in online:
        _ask_redis(online, "HSET", profile["project"], mark)
    elif "path" in online:
        _write_sqlite(Path(online["path"]), mark)


def _ask_redis(online: dict[str, Any], command: str, *arguments: object) -> Any:
    try:
        with closing(redis_client(online)) as client:
            return client.execute_command(command, MARKS, *arguments)
    except redis.RedisError as exc:
        raise TransientError(
            f"Redis did not answer {command} on {MARKS} ({type(exc).__name__}); start it, then run "
            "again. The watermark was not moved"
        ) from exc


def _read_sqlite(path: Path) -> int | None:
    """The file's `user_version`; 0 in a file that nobody marked."""
    try:
        address = path.absolute().as_uri() + "?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as connection:
            found = connection.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.DatabaseError:
        return None
    return found or None


def _write_sqlite(path: Path, mark: int) -> None:
    try:
        with closing(sqlite3.connect(path, timeout=30)) as connection:
            connection.execute(f"PRAGMA user_version = {int(mark)}")
    except sqlite3.OperationalError as exc:
        raise TransientError(
            f"the online store could not be marked ({exc}); the watermark was not moved. Run again"
        ) from exc
