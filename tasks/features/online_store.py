"""Feast online store on SQLite that never lets an older value overwrite a newer one.

A plug-in by Feast's own extension point: name it as `online_store.type`. Feast's own
SQLite store overwrites whatever is there, so a late or repeated write puts a stale value in front
of readers; here the comparison is part of the write itself.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from datetime import datetime
from typing import Any

from feast.feature_view import FeatureView
from feast.infra.key_encoding_utils import serialize_entity_key
from feast.infra.online_stores.sqlite import (
    SqliteOnlineStore,
    SqliteOnlineStoreConfig,
    _quote_id,
    _table_id,
)
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.protos.feast.types.Value_pb2 import Value
from feast.repo_config import RepoConfig
from feast.utils import to_naive_utc

from tasks.errors import TransientError


class NewerWinsSqliteOnlineStoreConfig(SqliteOnlineStoreConfig):
    """Settings in `feature_store.yaml`: those of Feast's SQLite store."""

    type: str = "tasks.features.online_store.NewerWinsSqliteOnlineStore"


class NewerWinsSqliteOnlineStore(SqliteOnlineStore):
    """One SQLite file; a batch is written whole or not at all."""

    def online_write_batch(
        self,
        config: RepoConfig,
        table: FeatureView,
        data: list[tuple[EntityKey, dict[str, Value], datetime, datetime | None]],
        progress: Callable[[int], Any] | None,
    ) -> None:
        """Write the rows whose event time is not older than what is stored for their entity."""
        versioned = config.registry.enable_online_feature_view_versioning
        name = _quote_id(_table_id(config.project, table, versioned))
        rows = []
        for key, values, event, created in data:
            packed = serialize_entity_key(
                key, entity_key_serialization_version=config.entity_key_serialization_version
            )
            moments = (to_naive_utc(event), to_naive_utc(created) if created else None)
            rows += [(packed, f, v.SerializeToString(), *moments) for f, v in values.items()]
        try:
            with self._get_conn(config) as connection:
                connection.executemany(
                    f"INSERT INTO {name} (entity_key, feature_name, value, event_ts, created_ts) "
                    "VALUES (?, ?, ?, ?, ?) ON CONFLICT (entity_key, feature_name) DO UPDATE SET "
                    "value = excluded.value, event_ts = excluded.event_ts, "
                    "created_ts = excluded.created_ts WHERE (excluded.event_ts, "
                    f"coalesce(excluded.created_ts, '')) >= ({name}.event_ts, "
                    f"coalesce({name}.created_ts, ''))",
                    rows,
                )
        except sqlite3.OperationalError as exc:
            if "locked" not in str(exc):
                raise
            raise TransientError(f"the online store is in use by another process ({exc})") from exc
        if progress:
            progress(len(data))

    def count_entities(self, config: RepoConfig, table: FeatureView) -> int:
        """Number of entities that have a value of this view online."""
        versioned = config.registry.enable_online_feature_view_versioning
        name = _quote_id(_table_id(config.project, table, versioned))
        connection = self._get_conn(config)
        row = connection.execute(f"SELECT count(DISTINCT entity_key) FROM {name}").fetchone()
        return int(row[0])
