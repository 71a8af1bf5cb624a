"""Feast online store on SQLite that never lets an older value overwrite a newer one.

A plug-in by Feast's own extension point: name it as `online_store.type`. Feast's own
SQLite store overwrites whatever is there, so a late or repeated write puts a stale value in front
of readers; here the comparison is part of the write itself (`write_rules.py`). The tables are
Feast's, which its own store can read, with columns more (`sqlite_rows.py`).
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from feast.entity import Entity
from feast.feature_view import FeatureView
from feast.infra.key_encoding_utils import serialize_entity_key
from feast.infra.online_stores.helpers import extract_text_and_num
from feast.infra.online_stores.sqlite import (
    SqliteOnlineStore,
    SqliteOnlineStoreConfig,
    _quote_id,
    _table_id,
)
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.protos.feast.types.Value_pb2 import Value
from feast.repo_config import RepoConfig
from pydantic import model_validator

from tasks.features.online import sqlite_rows
from tasks.features.online.encoding import EncodedRows
from tasks.features.online.sqlite_rows import Row, ordered, stored_times, upsert
from tasks.features.online.write_rules import (
    PUSHED,
    Extent,
    Origin,
    check_newest,
    checked,
    current_origin,
)
from tasks.kernel.errors import FeatureStoreError, StorageError, TransientError
from tasks.kernel.files import shows_damage

LOCK_WAIT_S = 30
"""A writer waits this long for another writer; readers never wait."""

TRANSACTION_S = 2.0
"""Batches are written in one transaction until this many seconds have passed."""

CACHE_KIB = 128 * 1024
"""A writer's pages in memory; more spill to the log."""

CHECKPOINT_PAGES = 16_384
"""Pages of 4 KiB after which the log is written back: seldom enough to write each page once."""


class NewerWinsSqliteOnlineStoreConfig(SqliteOnlineStoreConfig):
    """Settings in `feature_store.yaml`: those of Feast's SQLite store."""

    type: str = "tasks.features.online.sqlite_store.NewerWinsSqliteOnlineStore"

    @model_validator(mode="after")
    def _keeps_plain_values(self) -> Self:
        if self.vector_enabled or self.text_search_enabled or self.enable_openai_compatible_store:
            raise ValueError(
                "this online store keeps no vectors and no text index; remove vector_enabled, "
                "text_search_enabled and enable_openai_compatible_store, or use another store"
            )
        return self


class NewerWinsSqliteOnlineStore(SqliteOnlineStore):
    """One SQLite file in which a batch is written whole or not at all, beside its readers."""

    _inode: tuple[int, int] | None = None
    """File that the readers' connection was opened on."""

    def update(
        self,
        config: RepoConfig,
        tables_to_delete: Sequence[FeatureView],
        tables_to_keep: Sequence[FeatureView],
        entities_to_delete: Sequence[Entity],
        entities_to_keep: Sequence[Entity],
        partial: bool,
    ) -> None:
        """Make the views' tables, and drop those of views that are gone, of all their versions.

        Raises:
            FeatureStoreError: the file is damaged. Others as for `write_rows`.
        """
        with self._explained(config):
            super().update(
                config,
                tables_to_delete,
                tables_to_keep,
                entities_to_delete,
                entities_to_keep,
                partial,
            )
            kept = {_table_id_of(config, view) for view in tables_to_keep}
            connection = self._get_conn(config)
            for view in tables_to_delete:
                for name in _version_tables(connection, f"{config.project}_{view.name}"):
                    if name not in kept:  # a view may be named like a version of another
                        connection.execute(f"DROP TABLE IF EXISTS {_quote_id(name)}")

    def online_write_batch(
        self,
        config: RepoConfig,
        table: FeatureView,
        data: list[tuple[EntityKey, dict[str, Value], datetime, datetime | None]],
        progress: Callable[[int], Any] | None,
    ) -> None:
        """Write the rows whose event time is not older than what is stored for their entity.

        Raises:
            WindowError: a time lies in the future. Others as for `write_rows`.
        """
        by_features: dict[tuple[str, ...], list[Row]] = {}
        newest_us = created_us = 0
        for key, values, event, created in data:
            cells = [
                cell
                for value in values.values()
                for cell in (value.SerializeToString(), extract_text_and_num(value, False)[0])
            ]
            packed = serialize_entity_key(
                key, entity_key_serialization_version=config.entity_key_serialization_version
            )
            moments = (*stored_times(event), *stored_times(created))
            newest_us = max(newest_us, moments[1] or 0)
            created_us = max(created_us, moments[3] or 0)
            by_features.setdefault(tuple(values), []).append((packed, *moments, *cells))
        check_newest(table.name, newest_us, created_us)
        with self._transaction(config) as connection:
            name, origin = _table_id_of(config, table), current_origin()
            for features, rows in by_features.items():
                upsert(connection, name, features, rows, origin)
        if progress:
            progress(len(data))

    def write_rows(
        self,
        config: RepoConfig,
        table: FeatureView,
        batches: Iterable[EncodedRows],
        origin: Origin = PUSHED,
    ) -> int:
        """Write encoded rows, an entity never in part; older ones are passed over.

        Batches share a transaction for a few seconds: pages that several of them touch are written
        once, and another writer does not wait longer than that.

        Returns:
            Entities that got new values; the others had newer ones.

        Raises:
            WindowError: a time lies in the future.
            TransientError: another process held the file for too long.
            FeatureStoreError: the feature view has no table yet, or the file is damaged.
            StorageError: the disk refused the write. What was committed before stays, whole.
        """
        name, written = _table_id_of(config, table), 0
        with self._writer(config) as connection:
            for rows in checked(table.name, batches):
                if not connection.in_transaction:
                    connection.execute("BEGIN IMMEDIATE")
                    begun = time.monotonic()
                changed = upsert(connection, name, tuple(rows.features), ordered(rows), origin)
                written += -(-changed // max(len(rows.features), 1))
                if time.monotonic() - begun > TRANSACTION_S:
                    connection.execute("COMMIT")
            if connection.in_transaction:
                connection.execute("COMMIT")
        return written

    def count_left_behind(
        self, config: RepoConfig, table: FeatureView, start_us: int, origin: Origin
    ) -> int:
        """Entities with a value in the window that this materialization did not find any more."""
        with self._transaction(config) as connection:
            name = _table_id_of(config, table)
            return sqlite_rows.count_left_behind(connection, name, start_us, origin)

    def remove_left_behind(
        self, config: RepoConfig, table: FeatureView, start_us: int, origin: Origin
    ) -> None:
        """Remove what `count_left_behind` counts."""
        with self._transaction(config) as connection:
            name = _table_id_of(config, table)
            sqlite_rows.remove_left_behind(connection, name, start_us, origin)

    def remove_values(
        self,
        config: RepoConfig,
        table: FeatureView,
        keys: Sequence[bytes] | None = None,
        features: Sequence[str] | None = None,
        extent: Extent = "all",
    ) -> int:
        """Remove values of a view; return how many entities had one.

        Args:
            keys: serialized entity keys; None for all.
            features: names; None for all.
            extent: which of them.
        """
        with self._transaction(config) as connection:
            name = _table_id_of(config, table)
            return sqlite_rows.remove(connection, name, keys, features, extent)

    def count_entities(self, config: RepoConfig, table: FeatureView) -> int:
        """Number of entities that have a value of this view online."""
        name = _quote_id(_table_id_of(config, table))
        with self._explained(config):
            connection = self._get_conn(config)
            row = connection.execute(f"SELECT count(DISTINCT entity_key) FROM {name}").fetchone()
        return int(row[0])

    def _get_conn(self, config: RepoConfig) -> sqlite3.Connection:
        """The connection of readers; it never holds a transaction open.

        A file that was removed and made again elsewhere is opened again: the old one is a ghost.
        """
        self._conn: sqlite3.Connection | None
        path = Path(self._get_db_path(config))
        if self._conn is not None and _inode_of(path) != self._inode:
            self._conn.close()
            self._conn = None
        opened = self._conn is not None
        connection: sqlite3.Connection = super()._get_conn(config)
        if not opened:
            try:
                connection.execute(f"PRAGMA busy_timeout = {LOCK_WAIT_S * 1000}")
                connection.execute("PRAGMA journal_mode = WAL")  # a writer shuts no reader out
            except sqlite3.DatabaseError:
                connection.close()
                self._conn = None  # else the next call would take it for a good one
                raise
            self._inode = _inode_of(path)
        return connection

    @contextmanager
    def _explained(self, config: RepoConfig) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as exc:
            raise _explained(exc, self._get_db_path(config)) from exc

    @contextmanager
    def _writer(self, config: RepoConfig) -> Iterator[sqlite3.Connection]:
        """A connection of its own: readers in this process must not see rows before the commit."""
        with self._explained(config):
            self._get_conn(config)  # makes the file
            with closing(
                sqlite3.connect(
                    self._get_db_path(config), timeout=LOCK_WAIT_S, isolation_level=None
                )
            ) as connection:  # closing rolls back what was not committed
                connection.execute("PRAGMA synchronous = NORMAL")  # whole after a crash, in WAL
                connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
                connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
                yield connection

    @contextmanager
    def _transaction(self, config: RepoConfig) -> Iterator[sqlite3.Connection]:
        """One transaction of a writer, whole or not at all."""
        with self._writer(config) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")


def _version_tables(connection: sqlite3.Connection, table: str) -> list[str]:
    """Tables of a view: of its first version and of all numbered ones."""
    found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    versions = re.compile(re.escape(table) + r"(_v\d+)?")
    return [name for (name,) in found if versions.fullmatch(name)]


def _inode_of(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _table_id_of(config: RepoConfig, table: FeatureView) -> str:
    versioned = config.registry.enable_online_feature_view_versioning
    return str(_table_id(config.project, table, versioned))


def _explained(exc: sqlite3.DatabaseError, file: str) -> Exception:
    said = str(exc)
    undone = "Nothing of this batch was written"
    if "locked" in said or "busy" in said:
        return TransientError(
            f"the online store is in use by another process ({exc}); waited {LOCK_WAIT_S} s for "
            f"it. {undone}; run again"
        )
    if "no such table" in said:
        return FeatureStoreError(
            f"the online store lacks a feature view's table ({exc}); apply the feature "
            f"definitions, then write again. {undone}"
        )
    if not shows_damage(exc) and any(s in said for s in ("disk", "readonly", "unable to open")):
        return StorageError(
            f"the online store's disk refused a write ({exc}); expected a writable folder with "
            f"free space. {undone}; mend it and run again"
        )
    return FeatureStoreError(
        f"the online store refused a write ({exc}); expected a whole SQLite file with Feast's "
        f"tables. {undone}; remove {file} and refresh, which fills it again"
    )
