"""What a feature table's query gave: its columns, keys and times, checked before it is written."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import duckdb

from tasks.contracts.base import TimeWindow
from tasks.features.config import CLOCK_SKEW, LONGEST_LAG, FeatureTable
from tasks.features.offline.duck import endless_numbers, names, sql_name
from tasks.kernel.errors import ConfigurationError, DataContractError

logger = logging.getLogger(__name__)


def check_computed(con: duckdb.DuckDBPyConnection, table: FeatureTable, window: TimeWindow) -> None:
    """Check the table `computed`.

    Args:
        window: what the query was asked for.

    Raises:
        ConfigurationError: a column is missing.
        DataContractError: a key is null or has two rows at one moment, a number is infinite, or a
            time lies after the window or in the future.
    """
    _check_columns(con, table)
    _check_keys(con, table)
    if endless := endless_numbers(con, "computed", table.unbounded):
        raise DataContractError(
            f"feature table {table.name}: {endless}; expected numbers. Divide by "
            f"nullif(..., 0) in {table.sql}, or name the column among `unbounded` of the table "
            "in use_case.yaml. Nothing was published"
        )
    _check_times(con, table, window)


def _check_columns(con: duckdb.DuckDBPyConnection, table: FeatureTable) -> None:
    present = {row[0] for row in con.execute("DESCRIBE computed").fetchall()}
    needed = {*table.entity_keys, "event_timestamp", "created"}
    if missing := sorted(needed - present):
        raise ConfigurationError(
            f"query {table.sql} gives no column {', '.join(missing)}; a feature table needs "
            "its keys, event_timestamp and created. Nothing was changed"
        )


def _check_keys(con: duckdb.DuckDBPyConnection, table: FeatureTable) -> None:
    keys = names([*table.entity_keys, "event_timestamp"])
    nulls = " OR ".join(f"{sql_name(k)} IS NULL" for k in (*table.entity_keys, "event_timestamp"))
    doubled = con.execute(
        f"SELECT count(*) FROM (SELECT 1 FROM computed GROUP BY {keys} HAVING count(*) > 1)"
    ).fetchall()[0][0]
    nameless = con.execute(f"SELECT count(*) FROM computed WHERE {nulls}").fetchall()[0][0]
    if doubled or nameless:
        raise DataContractError(
            f"feature table {table.name}: {doubled} key(s) have two rows at one moment and "
            f"{nameless} row(s) have a null key or time; expected one row a key and moment. "
            "Check the raw rows for duplicates. Nothing was published"
        )


def _check_times(con: duckdb.DuckDBPyConnection, table: FeatureTable, window: TimeWindow) -> None:
    """Refuse what cannot be known yet; count what was in the store before it held.

    Such a row is right where a value is known ahead, like a price from tomorrow on, so whether it
    may be is for the table's expectation suite to say.
    """
    now = datetime.now(UTC)
    end = now + CLOCK_SKEW if table.static else window.end
    event, created = "event_timestamp::TIMESTAMPTZ", "created::TIMESTAMPTZ"
    late, newest, ahead, latest, early = con.execute(
        f"SELECT count(*) FILTER ({event} >= $end::TIMESTAMPTZ), max({event}), "
        f"count(*) FILTER ({created} > $latest::TIMESTAMPTZ), max({created}), "
        f"count(*) FILTER ({created} < {event}) FROM computed",
        {"end": end, "latest": now + LONGEST_LAG},
    ).fetchall()[0]
    if late:
        raise DataContractError(
            f"feature table {table.name}: {late:,} row(s) have an event_timestamp at or after "
            f"{end:%Y-%m-%dT%H:%MZ}, the newest {newest.isoformat()}; expected moments before "
            f"{'now' if table.static else 'the end of the window'}, from which the values are "
            f"known. Mend the times, or bound them in {table.sql} by getvariable('window_end'). "
            "Nothing was published"
        )
    if ahead:
        raise DataContractError(
            f"feature table {table.name}: {ahead:,} row(s) have a created that is more than "
            f"{LONGEST_LAG} after now, the latest {latest.isoformat()}; expected the moment at "
            f"which a row is in the store. Mend {table.sql} or its raw rows. Nothing was published"
        )
    if early:
        logger.warning(
            "feature table %s: %s row(s) have a created before their event_timestamp; they are "
            "used from the event_timestamp on. Where that cannot be, let suite %s refuse it",
            table.name,
            f"{early:,}",
            table.suite,
        )
