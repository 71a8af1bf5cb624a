"""What was already done with the feature store, told without opening it.

Importing Feast takes seconds; a run that finds everything in place never needs it.

A token inside the online store shows that it is the one that was filled. It is written when a first
materialization is complete, and compared before the ledger is believed. A store that was removed,
emptied, or restored from elsewhere lacks it or holds another, and is filled again with all of
history.
"""

import json
import secrets
import sqlite3
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import redis
from pydantic import AliasChoices, Field, ValidationError, model_validator

from tasks.contracts.base import Contract, TimeWindow
from tasks.contracts.data import FeatureTables, MaterializedView
from tasks.features.access.profile import profile_file, read_profile, redis_parts
from tasks.features.config import FeatureConfig
from tasks.features.declared import columns
from tasks.features.declared.queries import frame_query, read_query
from tasks.kernel.errors import TransientError
from tasks.kernel.files import digest_of
from tasks.kernel.settings import bring, code_digest, content_key, put
from tasks.metadata.database import held_everywhere

SNAPSHOTS = "snapshots"
RETRIEVAL = (
    "tasks.features.snapshot",
    "tasks.features.offline.store",  # these two by `feature_store.yaml`
    "tasks.features.offline.spark_store",
)
"""Modules that make a training set."""


class Ledger(Contract):
    """Which tables and definitions were materialized, and each view's watermark.

    `sources` are those of the tables; nothing is known of them in a ledger of an earlier version.
    """

    version: str
    sources: dict[str, str] = Field(default={})
    definitions: str
    token: int = Field(validation_alias=AliasChoices("token", "mark"))
    views: tuple[MaterializedView, ...]

    @model_validator(mode="after")
    def _tells_moments(self) -> Self:
        if any(view.watermark.tzinfo is None for view in self.views):
            raise ValueError("a watermark has no time zone")
        return self


def definitions_digest(repo: Path) -> str:
    """Digest of what decides the feature definitions: all Python files and the store's settings.

    Where they are derived, what they are derived from, and the file that does it.
    """
    defining = columns.defining_files(repo)
    files = sorted(repo.glob("*.py")) if defining else columns.feast_files(repo)
    content: list[object] = [[file.name, digest_of(file)] for file in (*files, profile_file(repo))]
    if not defining:
        content.append(asdict(columns.described_features(repo)))
    if columns.PERMISSIONS_FILE not in {file.name for file in files} or not defining:
        content.append(Path(__file__).parents[1] / "declared" / "definitions.py")
    return content_key(content)


def training_set_key(
    tables: FeatureTables, window: TimeWindow, config: FeatureConfig, repo: Path
) -> str:
    """Digest of everything that decides a training set."""
    spec = config.training_set
    texts = [frame_query(repo, config), *(read_query(repo, query.sql) for query in config.staging)]
    return content_key(
        code_digest(__file__, *RETRIEVAL),
        definitions_digest(repo),
        tables.version,
        window,
        spec,
        texts,
    )


def load_ledger(home: Path) -> Ledger | None:
    """The ledger; None where it is absent, was cut off, or does not say all that it must."""
    try:
        return Ledger.model_validate(read_json(bring(home / "feast" / "materialized.json")))
    except ValidationError:
        return None


def write_ledger(
    tables: FeatureTables, repo: Path, views: tuple[MaterializedView, ...], home: Path, token: int
) -> None:
    """Record a finished materialization of a store that bears `token`.

    Of two that end at the same time with the same tables, the later watermark stays.
    """
    new = Ledger(
        version=tables.version,
        sources=tables.sources,
        definitions=definitions_digest(repo),
        token=token,
        views=views,
    )
    file = home / "feast" / "materialized.json"
    with held_everywhere(file.with_suffix(".lock")):
        known = load_ledger(home)
        if known and known.model_copy(update={"views": views}) == new:
            new = new.model_copy(update={"views": _not_behind(views, known.views)})
        put(file, new.model_dump_json(indent=1))


def _not_behind(
    views: tuple[MaterializedView, ...], known: tuple[MaterializedView, ...]
) -> tuple[MaterializedView, ...]:
    ahead = {view.name: view.watermark for view in known}
    latest = {v.name: max(v.watermark, ahead.get(v.name, v.watermark)) for v in views}
    return tuple(view.model_copy(update={"watermark": latest[view.name]}) for view in views)


def online_views(
    tables: FeatureTables, window: TimeWindow, home: Path, repo: Path
) -> tuple[MaterializedView, ...] | None:
    """The views, where these tables are online up to the window's end; None where they are not.

    They are where the online store is the one that the ledger speaks of, and was not emptied.

    Raises:
        TransientError: Redis does not answer.
    """
    ledger = load_ledger(home)
    is_online = (
        ledger is not None
        and ledger.version == tables.version
        and ledger.definitions == definitions_digest(repo)
        and all(view.watermark >= window.end for view in ledger.views)
        and read_token(home, repo) == ledger.token
    )
    return ledger.views if ledger and is_online else None


def read_json(path: Path) -> dict[str, Any]:
    """Content of a small JSON file; empty where it is absent, cut off, or no JSON at all."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


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
