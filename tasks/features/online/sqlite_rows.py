"""Rows of Feast's SQLite tables: how a batch is compared and written, what is removed.

The tables are Feast's, with three columns more: event time and `created` in microseconds (Feast's
are whole seconds, which cannot tell two values of one second apart), and the origin of the value,
as `tasks.features.online.write_rules` has it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow.compute as pc
from feast.infra.online_stores.sqlite import _quote_id
from feast.utils import to_naive_utc
from feast.value_type import ValueType

from tasks.features.online.encoding import NO_TIME, EncodedColumn, EncodedRows
from tasks.features.online.wire_format import Integers
from tasks.features.online.write_rules import Extent, Origin

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICRO = 1_000_000
ZONE_STEP_US = 900 * MICRO
MAX_INTEGER = 2**63 - 1
COLUMNS = ("event_us", "created_us", "origin_us")
Row = tuple[object, ...]


def upsert(
    connection: sqlite3.Connection,
    table: str,
    features: Sequence[str],
    rows: Iterable[Row],
    origin: Origin,
) -> int:
    """Write rows of key, event seconds and microseconds, created ones, and a value and text each.

    Returns:
        Number of values that were written.
    """
    name = _quote_id(table)
    make_ready(connection, table)
    values = ", ".join(
        f"(?1, {_text(feature)}, ?{6 + 2 * i}, ?{7 + 2 * i}, ?2, ?4, ?3, ?5, {origin.began_us:d})"
        for i, feature in enumerate(features)
    )
    copied = ("value", "value_text", "event_ts", "created_ts", *COLUMNS)
    ours = origin.began_us or MAX_INTEGER  # what is pushed comes after what was written before
    before = connection.total_changes
    connection.executemany(
        f"INSERT INTO {name} (entity_key, feature_name, {', '.join(copied)}) VALUES {values} "
        "ON CONFLICT (entity_key, feature_name) DO UPDATE "
        f"SET {', '.join(f'{column} = excluded.{column}' for column in copied)} "
        f"WHERE (excluded.event_us, coalesce(excluded.created_us, {NO_TIME}), {ours}) >= "
        f"(coalesce({name}.event_us, {_microseconds(name)}), "
        f"coalesce({name}.created_us, {NO_TIME}), coalesce({name}.origin_us, 0)) "
        f"OR ({_earlier_copy(name, origin)})",
        rows,
    )
    return connection.total_changes - before


def _earlier_copy(name: str, origin: Origin) -> str:
    """SQL of what an earlier materialization left in this one's window."""
    return (
        f"{name}.origin_us BETWEEN 1 AND {origin.began_us - 1:d} "
        f"AND {name}.event_us <= {origin.end_us:d}"
    )


def count_left_behind(
    connection: sqlite3.Connection, table: str, start_us: int, origin: Origin
) -> int:
    """Entities with a value that an earlier materialization left in this one's window."""
    name = _quote_id(table)
    make_ready(connection, table)
    row = connection.execute(
        f"SELECT count(DISTINCT entity_key) FROM {name} WHERE {_earlier_copy(name, origin)} "
        f"AND event_us >= {start_us:d}"
    ).fetchone()
    return int(row[0])


def remove_left_behind(
    connection: sqlite3.Connection, table: str, start_us: int, origin: Origin
) -> None:
    """Remove what `count_left_behind` counts."""
    name = _quote_id(table)
    connection.execute(
        f"DELETE FROM {name} WHERE {_earlier_copy(name, origin)} AND event_us >= {start_us:d}"
    )


_EXTENTS: dict[Extent, str] = {
    "all": "true",
    "unknown": "origin_us IS NULL",
    "not of the table": "coalesce(origin_us, 0) = 0",
}


def remove(
    connection: sqlite3.Connection,
    table: str,
    keys: Sequence[bytes] | None,
    features: Sequence[str] | None,
    extent: Extent,
) -> int:
    """Remove values; return how many entities had one.

    Args:
        keys: serialized entity keys; None for all.
        features: names; None for all.
        extent: which of them.
    """
    name = _quote_id(table)
    if not make_ready(connection, table):
        return 0
    named = "true" if features is None else f"feature_name IN ({', '.join(map(_text, features))})"
    held = f"{named} AND {_EXTENTS[extent]}"
    if keys is None:
        row = connection.execute(f"SELECT count(DISTINCT entity_key) FROM {name} WHERE {held}")
        found = int(row.fetchone()[0])
        connection.execute(f"DELETE FROM {name} WHERE {held}")
        return found
    found = 0
    for key in keys:
        deleted = connection.execute(f"DELETE FROM {name} WHERE entity_key = ? AND {held}", [key])
        found += deleted.rowcount > 0
    return found


def _microseconds(name: str) -> str:
    """SQL of the event time of a row that Feast's own store wrote: local time read as UTC."""
    return f"strftime('%s', {name}.event_ts, 'unixepoch', 'localtime') * 1000000"


def make_ready(connection: sqlite3.Connection, table: str) -> bool:
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


def ordered(rows: EncodedRows) -> list[Row]:
    """Rows as `upsert` takes them, in the order of their keys: neighbours share pages."""
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


def stored_times(moment: datetime | None) -> tuple[int | None, int | None]:
    """Feast's seconds, and microseconds since 1970 in UTC."""
    if moment is None:
        return None, None
    naive = to_naive_utc(moment)
    return int(naive.timestamp()), (naive - EPOCH.replace(tzinfo=None)) // timedelta(microseconds=1)


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
