"""Where lineage goes: a namespace, an owner, and a collector if there is one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import Settings

DEFAULT_NAMESPACE = "falaj"
DEFAULT_ENDPOINT = "api/v1/lineage"
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True)
class LineageSettings:
    """Lineage of one installation. Files are always written; a collector gets the events too."""

    folder: Path
    """JSON lines, one file a day, appended to and never rewritten."""
    namespace: str = DEFAULT_NAMESPACE
    owner: str | None = None
    """As OpenLineage writes it, such as `team:flights`."""
    url: str | None = None
    endpoint: str = DEFAULT_ENDPOINT
    api_key: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> LineageSettings:
        """Read `FALAJ_LINEAGE_NAMESPACE`, `FALAJ_LINEAGE_OWNER` and OpenLineage's own names.

        These are `OPENLINEAGE_URL` (none: files alone), `OPENLINEAGE_ENDPOINT` and
        `OPENLINEAGE_API_KEY`, which has no other place.

        Raises:
            ConfigurationError: the address is none, holds a password, or would send the key
                unencrypted to another machine.
        """
        env = os.environ if environment is None else environment
        url, key = env.get("OPENLINEAGE_URL") or None, env.get("OPENLINEAGE_API_KEY") or None
        if url:
            _check_address(url, key)
        return cls(
            folder=Settings.from_environment(env).home / "lineage",
            namespace=env.get("FALAJ_LINEAGE_NAMESPACE") or DEFAULT_NAMESPACE,
            owner=env.get("FALAJ_LINEAGE_OWNER") or None,
            url=url,
            endpoint=env.get("OPENLINEAGE_ENDPOINT") or DEFAULT_ENDPOINT,
            api_key=key,
        )


def _check_address(url: str, key: str | None) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(
            "OPENLINEAGE_URL is no address of a collector; expected https://<host>. Unset it to "
            "write files alone"
        )
    if parts.username or parts.password:
        raise ConfigurationError(
            "OPENLINEAGE_URL holds a user or password, which would stand in logs; give a key in "
            "OPENLINEAGE_API_KEY"
        )
    if key and parts.scheme == "http" and parts.hostname not in LOOPBACK:
        raise ConfigurationError(
            f"OPENLINEAGE_URL names {parts.hostname} over http, and OPENLINEAGE_API_KEY would "
            "travel readable; use https"
        )
