"""Whether the online store still holds what the ledger says, told without opening Feast.

A SQLite file may be removed and a Redis emptied; the ledger in the state folder knows of neither.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import redis

from tasks.features.access.addresses import redis_parts
from tasks.features.access.profile import read_profile
from tasks.kernel.errors import TransientError

OWNERS = "falaj:owners"
"""Hash in Redis: project to the identity of the registry that holds its definitions."""


def online_store_is_there(home: Path, repo: Path) -> bool:
    """True where definitions were applied to the profile's online store and it was not removed.

    Raises:
        TransientError: Redis does not answer.
    """
    profile = read_profile(home, repo)
    online = profile["online_store"]
    if "connection_string" in online:
        return _redis_knows(profile["project"], online)
    return "path" not in online or Path(online["path"]).exists()


def _redis_knows(project: str, online: dict[str, Any]) -> bool:
    nodes, _ = redis_parts(online["connection_string"])
    try:
        with closing(redis_client(online)) as client:
            return bool(client.hexists(OWNERS, project))
    except redis.RedisError as exc:
        raise TransientError(
            f"Redis on {nodes[0][0]} does not answer ({type(exc).__name__}); start it or mend "
            "FALAJ_REDIS. Nothing was written"
        ) from exc


def redis_client(online: dict[str, Any]) -> Any:
    """A client of the Redis that the section `online_store` of a profile names."""
    nodes, options = redis_parts(online["connection_string"])
    arguments = {name: _typed(value) for name, value in options.items()}
    return _client(nodes, arguments, online.get("redis_type", "redis"))


def _client(nodes: list[tuple[str, int]], options: dict[str, Any], kind: str) -> Any:
    host, port = nodes[0]
    kinds = {"redis": redis.Redis, "redis_cluster": redis.RedisCluster}
    return kinds[kind](host=host, port=port, **options)


def _typed(value: str) -> Any:
    """As Feast reads an option: JSON where it is, text otherwise."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
