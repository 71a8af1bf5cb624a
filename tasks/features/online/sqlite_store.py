"""Feast online store on SQLite that never lets an older value overwrite a newer one.

Name it as `online_store.type`. Feast's own SQLite store overwrites whatever is there; here the
comparison is part of the write itself (`newer_wins.py`). The tables are Feast's, with three
columns more: event time and `created` in microseconds (Feast's are whole seconds, which cannot tell
two values of one second apart), and the origin of the value. Feast's `value_text` stays empty: it
is for a text index, which this store has not.
"""

import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from feast.feature_view import FeatureView
from feast.infra.online_stores.sqlite import (
    SqliteOnlineStore,
    SqliteOnlineStoreConfig,
    _quote_id,
    _table_id,
)
from feast.repo_config import RepoConfig
from pydantic import model_validator

from tasks.features.offline.duck import sql_text
from tasks.features.online import newer_wins
from tasks.features.online.encoding import NO_TIME, EncodedRows
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

COLUMNS = ("event_us", "created_us", "origin_us")


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


class NewerWinsSqliteOnlineStore(newer_wins.NewerWinsOnlineStore, SqliteOnlineStore):
    """One SQLite file in which a batch is written whole or not at all, beside its readers."""

    _inode: tuple[int, int] | None = None
    """File that the readers' connection was opened on."""

    def update(
        self,
        config: RepoConfig,
        tables_to_delete: Sequence[FeatureView],
        tables_to_keep: Sequence[FeatureView],
        *arguments: Any,
        **options: Any,
    ) -> None:
        """Make the views' tables, and drop those of views that are gone, of all their versions.

        Raises:
            FeatureStoreError: the file is damaged. Others as for `write_rows`.
        """
        with self._explained(config):
            super().update(config, tables_to_delete, tables_to_keep, *arguments, **options)
            kept = {_table_id_of(config, view) for view in tables_to_keep}
            connection = self._get_conn(config)
            for name in kept:
                _make_ready(connection, name)
            for view in tables_to_delete:
                for name in _version_tables(connection, f"{config.project}_{view.name}"):
                    if name not in kept:  # a view may be named like a version of another
                        connection.execute(f"DROP TABLE IF EXISTS {_quote_id(name)}")

    def write_rows(
        self,
        config: RepoConfig,
        table: FeatureView,
        batches: Iterable[EncodedRows],
        origin: newer_wins.Origin = newer_wins.PUSHED,
    ) -> int:
        """As `NewerWinsOnlineStore.write_rows`; what was committed before an error stays, whole.

        Batches share a transaction for a few seconds: pages that several of them touch are written
        once, and another writer does not wait longer than that.

        Raises:
            FeatureStoreError: the feature view has no table yet, or the file is damaged.
            StorageError: the disk refused the write.
        """
        name, written = _table_id_of(config, table), 0
        with self._writer(config) as connection:
            for rows in newer_wins.checked(table.name, batches):
                if not connection.in_transaction:
                    connection.execute("BEGIN IMMEDIATE")
                    begun = time.monotonic()
                written += -(-_upsert(connection, name, rows, origin) // max(len(rows.features), 1))
                if time.monotonic() - begun > TRANSACTION_S:
                    connection.execute("COMMIT")
            if connection.in_transaction:
                connection.execute("COMMIT")
        return written

    def remove_values(
        self,
        config: RepoConfig,
        table: FeatureView,
        meant: newer_wins.Removal = newer_wins.EVERYTHING,
    ) -> int:
        """As `NewerWinsOnlineStore.remove_values`, in one transaction."""
        name = _table_id_of(config, table)
        began_us, start_us, end_us = meant.window
        condition = {
            "all": "true",
            "unknown": "origin_us IS NULL",
            "not of the table": "coalesce(origin_us, 0) = 0",
            "left behind": f"{_earlier_copy(began_us, end_us)} AND event_us >= {start_us:d}",
        }[meant.extent]
        if meant.features is not None:
            condition += f" AND feature_name IN ({', '.join(map(sql_text, meant.features))})"
        values = f"FROM {_quote_id(name)} WHERE {condition}"
        counted = f"SELECT count(DISTINCT entity_key) {values}"
        with self._writer(config) as connection:
            connection.execute("BEGIN IMMEDIATE")
            if not _make_ready(connection, name):
                found = 0
            elif meant.keys is not None:
                each = f"DELETE {values} AND entity_key = ?"
                found = sum(connection.execute(each, [key]).rowcount > 0 for key in meant.keys)
            else:
                found = int(connection.execute(counted).fetchone()[0])
                if not meant.count_only:
                    connection.execute(f"DELETE {values}")
            connection.execute("COMMIT")
        return found

    def entity_keys(self, config: RepoConfig, table: FeatureView) -> Iterator[bytes]:
        """As `NewerWinsOnlineStore.entity_keys`."""
        name = _table_id_of(config, table)
        with self._explained(config):
            connection = self._get_conn(config)
            if connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", [name]).fetchone():
                query = f"SELECT DISTINCT entity_key FROM {_quote_id(name)}"
                yield from (key for (key,) in connection.execute(query).fetchall())

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
            path = self._get_db_path(config)
            with closing(
                sqlite3.connect(path, timeout=LOCK_WAIT_S, isolation_level=None)
            ) as connection:  # closing rolls back what was not committed
                connection.execute("PRAGMA synchronous = NORMAL")  # whole after a crash, in WAL
                connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
                connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
                yield connection


def _upsert(
    connection: sqlite3.Connection, table: str, rows: EncodedRows, origin: newer_wins.Origin
) -> int:
    """Write one batch; returns the number of values that were written."""
    name = _quote_id(table)
    _make_ready(connection, table)
    values = ", ".join(
        f"(?1, {sql_text(feature)}, ?{6 + i}, ?2, ?4, ?3, ?5, {origin.began_us:d})"
        for i, feature in enumerate(rows.features)
    )
    copied = ("value", "event_ts", "created_ts", *COLUMNS)
    ours = origin.began_us or 2**63 - 1  # what is pushed comes after what was written before
    before = connection.total_changes
    connection.executemany(
        f"INSERT INTO {name} (entity_key, feature_name, {', '.join(copied)}) VALUES {values} "
        "ON CONFLICT (entity_key, feature_name) DO UPDATE "
        f"SET value_text = NULL, {', '.join(f'{c} = excluded.{c}' for c in copied)} "
        f"WHERE (excluded.event_us, coalesce(excluded.created_us, {NO_TIME}), {ours}) >= "
        f"(coalesce({name}.event_us, {NO_TIME}), "
        f"coalesce({name}.created_us, {NO_TIME}), coalesce({name}.origin_us, 0)) "
        f"OR ({_earlier_copy(origin.began_us, origin.end_us, f'{name}.')})",
        _in_order_of_keys(rows),
    )
    return connection.total_changes - before


def _earlier_copy(began_us: int, end_us: int, of: str = "") -> str:
    """SQL of what an earlier materialization left in the window of a later one."""
    return f"{of}origin_us BETWEEN 1 AND {began_us - 1:d} AND {of}event_us <= {end_us:d}"


def _make_ready(connection: sqlite3.Connection, table: str) -> bool:
    """Add our columns; drop Feast's second index, whose searches the primary key serves.

    Returns:
        Whether there is such a table.
    """
    name = _quote_id(table)
    present = {row[1] for row in connection.execute(f"PRAGMA table_info({name})")}
    for column in COLUMNS if present else ():
        if column not in present:
            connection.execute(f"ALTER TABLE {name} ADD COLUMN {column} INTEGER")
    connection.execute(f"DROP INDEX IF EXISTS {_quote_id(table + '_ek')}")
    return bool(present)


def _in_order_of_keys(rows: EncodedRows) -> list[tuple[object, ...]]:
    """Key, event seconds and microseconds, created ones, then the values.

    Neighbours by key share pages.
    """
    events = rows.events_us.tolist()
    created: list[int | None] = [None] * len(rows)
    if rows.created_us is not None:
        created = [None if moment == NO_TIME else moment for moment in rows.created_us.tolist()]
    columns: list[Sequence[object]] = [
        rows.keys.to_pylist(),
        [feasts_seconds(moment) for moment in events],
        events,
        [None if moment is None else feasts_seconds(moment) for moment in created],
        created,
        *(feature.cells.to_pylist() for feature in rows.features.values()),
    ]
    return sorted(zip(*columns, strict=True), key=lambda row: row[0])


@lru_cache(65_536)
def feasts_seconds(moment_us: int) -> int:
    """Feast's time: the UTC wall clock read as local time, in whole seconds, cut towards zero."""
    epoch = newer_wins.EPOCH.replace(tzinfo=None)
    return int((epoch + timedelta(microseconds=moment_us)).timestamp())


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
    reason = str(exc)
    undone = "Nothing of this batch was written"
    if "locked" in reason or "busy" in reason:
        return TransientError(
            f"the online store is in use by another process ({exc}); waited {LOCK_WAIT_S} s for "
            f"it. {undone}; run again"
        )
    if "no such table" in reason:
        return FeatureStoreError(
            f"the online store lacks a feature view's table ({exc}); apply the feature "
            f"definitions, then write again. {undone}"
        )
    if not shows_damage(exc) and any(s in reason for s in ("disk", "readonly", "unable to open")):
        return StorageError(
            f"the online store's disk refused a write ({exc}); expected a writable folder with "
            f"free space. {undone}"
        )
    return FeatureStoreError(
        f"the online store refused a write ({exc}); expected a whole SQLite file with Feast's "
        f"tables. {undone}; remove {file} and refresh, which fills it again"
    )
