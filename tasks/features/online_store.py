"""Feast online store on SQLite that never lets an older value overwrite a newer one.

A plug-in by Feast's own extension point: name it as `online_store.type`. Feast's own
SQLite store overwrites whatever is there, so a late or repeated write puts a stale value in front
of readers; here the comparison is part of the write itself. The tables are Feast's, which its own
store can read, with two columns more: Feast's times are whole seconds, which cannot tell two values
of one second apart.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import numpy as np
import pyarrow.compute as pc
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
from feast.utils import to_naive_utc
from feast.value_type import ValueType
from pydantic import model_validator

from tasks.errors import FeatureStoreError, StorageError, TransientError
from tasks.features.value_encoding import NO_TIME, EncodedColumn, EncodedRows
from tasks.features.wire_format import Integers
from tasks.kernel.disk import shows_damage

LOCK_WAIT_S = 30
"""A writer waits this long for another writer; readers never wait."""

TRANSACTION_S = 2.0
"""Batches are written in one transaction until this many seconds have passed."""

CACHE_KIB = 128 * 1024
"""A writer's pages in memory; more spill to the log."""

CHECKPOINT_PAGES = 16_384
"""Pages of 4 KiB after which the log is written back: seldom enough to write each page once."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICRO = 1_000_000
ZONE_STEP_US = 900 * MICRO
Row = tuple[object, ...]


class NewerWinsSqliteOnlineStoreConfig(SqliteOnlineStoreConfig):
    """Settings in `feature_store.yaml`: those of Feast's SQLite store."""

    type: str = "tasks.features.online_store.NewerWinsSqliteOnlineStore"

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

    def update(
        self,
        config: RepoConfig,
        tables_to_delete: Sequence[FeatureView],
        tables_to_keep: Sequence[FeatureView],
        entities_to_delete: Sequence[Entity],
        entities_to_keep: Sequence[Entity],
        partial: bool,
    ) -> None:
        """Make the views' tables, and drop those of views that are gone.

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

    def online_write_batch(
        self,
        config: RepoConfig,
        table: FeatureView,
        data: list[tuple[EntityKey, dict[str, Value], datetime, datetime | None]],
        progress: Callable[[int], Any] | None,
    ) -> None:
        """Write the rows whose event time is not older than what is stored for their entity."""
        by_features: dict[tuple[str, ...], list[Row]] = {}
        for key, values, event, created in data:
            cells = [
                cell
                for value in values.values()
                for cell in (value.SerializeToString(), extract_text_and_num(value, False)[0])
            ]
            packed = serialize_entity_key(
                key, entity_key_serialization_version=config.entity_key_serialization_version
            )
            moments = (*_times(event), *_times(created))
            by_features.setdefault(tuple(values), []).append((packed, *moments, *cells))
        with self._writer(config) as connection:
            connection.execute("BEGIN IMMEDIATE")
            for features, rows in by_features.items():
                _upsert(connection, _table_id_of(config, table), features, rows)
            connection.execute("COMMIT")
        if progress:
            progress(len(data))

    def write_rows(
        self, config: RepoConfig, table: FeatureView, batches: Iterable[EncodedRows]
    ) -> int:
        """Write encoded rows, an entity never in part; older ones are passed over.

        Batches share a transaction for a few seconds: pages that several of them touch are written
        once, and another writer does not wait longer than that.

        Returns:
            Entities that got new values; the others had newer ones.

        Raises:
            TransientError: another process held the file for too long.
            FeatureStoreError: the feature view has no table yet, or the file is damaged.
            StorageError: the disk refused the write. What was committed before stays, whole.
        """
        name, written = _table_id_of(config, table), 0
        with self._writer(config) as connection:
            for rows in batches:
                if not connection.in_transaction:
                    connection.execute("BEGIN IMMEDIATE")
                    begun = time.monotonic()
                changed = _upsert(connection, name, tuple(rows.features), _ordered(rows))
                written += -(-changed // max(len(rows.features), 1))
                if time.monotonic() - begun > TRANSACTION_S:
                    connection.execute("COMMIT")
            if connection.in_transaction:
                connection.execute("COMMIT")
        return written

    def count_entities(self, config: RepoConfig, table: FeatureView) -> int:
        """Number of entities that have a value of this view online."""
        name = _quote_id(_table_id_of(config, table))
        with self._explained(config):
            connection = self._get_conn(config)
            row = connection.execute(f"SELECT count(DISTINCT entity_key) FROM {name}").fetchone()
        return int(row[0])

    def _get_conn(self, config: RepoConfig) -> sqlite3.Connection:
        """The connection of readers; it never holds a transaction open."""
        self._conn: sqlite3.Connection | None
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


def _upsert(
    connection: sqlite3.Connection, table: str, features: Sequence[str], rows: Iterable[Row]
) -> int:
    """Write rows of key, event seconds and microseconds, created ones, and a value and text each.

    Returns:
        Number of values that were written.
    """
    name = _quote_id(table)
    _make_ready(connection, table)
    values = ", ".join(
        f"(?1, {_text(feature)}, ?{6 + 2 * i}, ?{7 + 2 * i}, ?2, ?4, ?3, ?5)"
        for i, feature in enumerate(features)
    )
    before = connection.total_changes
    connection.executemany(
        f"INSERT INTO {name} (entity_key, feature_name, value, value_text, event_ts, created_ts, "
        f"event_us, created_us) VALUES {values} ON CONFLICT (entity_key, feature_name) DO UPDATE "
        "SET value = excluded.value, value_text = excluded.value_text, "
        "event_ts = excluded.event_ts, created_ts = excluded.created_ts, "
        "event_us = excluded.event_us, created_us = excluded.created_us "
        f"WHERE (excluded.event_us, coalesce(excluded.created_us, {NO_TIME})) >= "
        f"(coalesce({name}.event_us, {_microseconds(name)}), "
        f"coalesce({name}.created_us, {NO_TIME}))",
        rows,
    )
    return connection.total_changes - before


def _microseconds(name: str) -> str:
    """SQL of the event time of a row that Feast's own store wrote: local time read as UTC."""
    return f"strftime('%s', {name}.event_ts, 'unixepoch', 'localtime') * 1000000"


def _make_ready(connection: sqlite3.Connection, table: str) -> None:
    """Add the finer times; drop Feast's second index, whose searches the primary key serves."""
    name = _quote_id(table)
    present = {row[1] for row in connection.execute(f"PRAGMA table_info({name})")}
    if present and "event_us" not in present:
        connection.execute(f"ALTER TABLE {name} ADD COLUMN event_us INTEGER")
        connection.execute(f"ALTER TABLE {name} ADD COLUMN created_us INTEGER")
    connection.execute(f"DROP INDEX IF EXISTS {_quote_id(table + '_ek')}")


def _ordered(rows: EncodedRows) -> list[Row]:
    """Rows as `_upsert` takes them, in the order of their keys: neighbours share pages."""
    nothing = [None] * len(rows)
    created = rows.created_us
    columns: list[Sequence[object]] = [
        rows.keys.to_pylist(),
        _seconds(rows.events_us),
        rows.events_us.tolist(),
        nothing if created is None else _seconds(created),
        nothing if created is None else [None if c == NO_TIME else c for c in created.tolist()],
    ]
    for feature in rows.features.values():
        columns += [feature.cells.to_pylist(), _texts(feature) or nothing]
    return sorted(zip(*columns, strict=True), key=lambda row: row[0])


def _texts(feature: EncodedColumn) -> list[str | None] | None:
    """The readable form that Feast keeps beside numbers and texts; None for other types."""
    if feature.value_type not in _READABLE:
        return None
    column, kind = feature.source, _READABLE[feature.value_type]
    if not kind:
        return [None if value is None else str(value) for value in column.to_pylist()]
    values = pc.cast(column, "float64", safe=False).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        texts: list[str | None] = list(map(str, values.astype(kind).tolist()))
    for place in np.flatnonzero(np.isnan(values)).tolist():
        texts[place] = None
    return texts


_READABLE = {
    ValueType.FLOAT: "float32",
    ValueType.DOUBLE: "float64",
    **dict.fromkeys((ValueType.INT32, ValueType.INT64, ValueType.BOOL, ValueType.STRING), ""),
}
"""Types whose values Feast also keeps as text; floats by the precision of their own."""


def _seconds(moments_us: Integers) -> list[int | None]:
    """Feast's times: the UTC wall clock read as local time, in whole seconds, cut towards zero."""
    known = moments_us != NO_TIME
    steps, places = np.unique(np.where(known, moments_us // ZONE_STEP_US, 0), return_inverse=True)
    shifts = np.array([_shift_us(step) for step in steps.tolist()], np.int64)
    local_us = np.where(known, moments_us, 0) + shifts[places]
    seconds: list[int | None] = np.where(
        local_us < 0, -(-local_us // MICRO), local_us // MICRO
    ).tolist()
    for place in np.flatnonzero(~known).tolist():
        seconds[place] = None
    return seconds


def _shift_us(step: int) -> int:
    """How far local time lies from UTC in one quarter of an hour, the step of all time zones."""
    start = EPOCH.replace(tzinfo=None) + timedelta(microseconds=step * ZONE_STEP_US)
    return round(start.timestamp()) * MICRO - step * ZONE_STEP_US


def _times(moment: datetime | None) -> tuple[int | None, int | None]:
    """Feast's seconds, and microseconds since 1970 in UTC."""
    if moment is None:
        return None, None
    naive = to_naive_utc(moment)
    return int(naive.timestamp()), (naive - EPOCH.replace(tzinfo=None)) // timedelta(microseconds=1)


def _table_id_of(config: RepoConfig, table: FeatureView) -> str:
    versioned = config.registry.enable_online_feature_view_versioning
    return str(_table_id(config.project, table, versioned))


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


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
