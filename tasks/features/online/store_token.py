"""A token inside the online store: the sign that it is the one that was filled.

It is written when a first materialization is complete, and compared before the ledger is believed.
A store that was removed, emptied, or restored from elsewhere lacks it or holds another, and is then
filled again with all of history. Told without opening Feast.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import redis

from tasks.features.access.profile import read_profile, redis_parts
from tasks.kernel.errors import TransientError

TOKENS = "falaj:marks"
"""Hash in Redis: project to token."""

WITHOUT = 0
"""Of a store that can hold no token: its ledger is believed."""


def new_token() -> int:
    """A number from 1 to 2^31 - 1, as SQLite's header can hold it."""
    return secrets.randbelow(2**31 - 1) + 1


def read_token(home: Path, repo: Path) -> int | None:
    """The online store's token; None where it has none.

    Raises:
        TransientError: Redis does not answer.
    """
    profile = read_profile(home, repo)
    online = profile["online_store"]
    if "connection_string" in online:
        found = _ask_redis(online, "HGET", profile["project"])
        return None if found is None else int(found)
    return _read_sqlite(Path(online["path"])) if "path" in online else WITHOUT


def write_token(home: Path, repo: Path, token: int) -> None:
    """Write the token into the online store.

    Raises:
        TransientError: the store does not answer or is locked.
    """
    profile = read_profile(home, repo)
    online = profile["online_store"]
    if "connection_string" in online:
        _ask_redis(online, "HSET", profile["project"], token)
    elif "path" in online:
        _write_sqlite(Path(online["path"]), token)


def _ask_redis(online: dict[str, Any], command: str, *arguments: object) -> Any:
    ((host, port), *_), options = redis_parts(online["connection_string"])
    kind = {"redis": redis.Redis, "redis_cluster": redis.RedisCluster}[
        online.get("redis_type", "redis")
    ]
    try:
        typed = {name: _typed(value) for name, value in options.items()}
        client: Any = kind(host=host, port=port, **typed)
        with closing(client):
            return client.execute_command(command, TOKENS, *arguments)
    except redis.RedisError as exc:
        raise TransientError(
            f"Redis on {host} does not answer ({type(exc).__name__}); start it or correct "
            "FALAJ_REDIS, then run again. The watermark was not moved"
        ) from exc


def _typed(value: str) -> Any:
    """As Feast reads an option: JSON where it is, text otherwise."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _read_sqlite(path: Path) -> int | None:
    """The file's `user_version`; 0 in a file that has no token."""
    try:
        address = path.absolute().as_uri() + "?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as connection:
            found = connection.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.DatabaseError:
        return None
    return found or None


def _write_sqlite(path: Path, token: int) -> None:
    try:
        with closing(sqlite3.connect(path, timeout=30)) as connection:
            connection.execute(f"PRAGMA user_version = {int(token)}")
    except sqlite3.OperationalError as exc:
        raise TransientError(
            f"the token could not be written into the online store ({exc}); the watermark was not "
            "moved. Run again"
        ) from exc
