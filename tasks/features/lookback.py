"""Whether a feature query reads no further back than its table's `lookback_hours` says.

A refresh of a few hours gives a query only the raw rows of its lookback. If the query reads older
ones, its values online are others than those that a model was trained on.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb

from tasks.contracts.base import TimeWindow
from tasks.errors import ConfigurationError
from tasks.features.config import FeatureTable
from tasks.features.duck import names, parquet, sql_name, sql_text

NEWEST_ROWS = 1000
"""So many of a table's newest rows are computed again, and at most a tenth of those of the window:
a bound on what the check costs, and on how much of the past the window itself has left."""
LEAST_WINDOW = timedelta(days=1)
"""A shorter window gives a query hardly more rows than its lookback."""
RELATIVE = 1e-6
"""Sums of the same rows in another order differ by rounding, far less than this."""
PROBED = "probed"


def newest_part(
    con: duckdb.DuckDBPyConnection, rows: Path, computed: TimeWindow
) -> TimeWindow | None:
    """The end of a computed window that holds a table's newest rows; None where it has none."""
    found = con.execute(
        f"WITH dated AS (SELECT event_timestamp FROM {parquet(rows)} "
        "WHERE event_timestamp >= ?::TIMESTAMPTZ AND event_timestamp < ?::TIMESTAMPTZ) "
        "SELECT min(event_timestamp) FROM (FROM dated ORDER BY event_timestamp DESC "
        f"LIMIT (SELECT least({NEWEST_ROWS}, ceil(count(*) / 10))::BIGINT FROM dated))",
        [computed.start, computed.end],
    ).fetchall()[0][0]
    return found and TimeWindow(start=found.astimezone(UTC), end=computed.end)


def check_same_rows(
    con: duckdb.DuckDBPyConnection, table: FeatureTable, rows: Path, part: TimeWindow
) -> None:
    """Compare rows that were computed from all raw rows with those of `probed`, from the lookback.

    Args:
        con: holds `probed`, what the query gives where older raw rows are hidden from it.
        table: whose lookback is in question.
        rows: folder of its rows as they are to be published.
        part: the window of `probed`.

    Raises:
        ConfigurationError: they differ, so the query reads older rows.
    """
    key = [*table.entity_keys, "event_timestamp"]
    bounds = " AND ".join(
        f"event_timestamp {sign} {sql_text(moment.isoformat())}::TIMESTAMPTZ"
        for sign, moment in ((">=", part.start), ("<", part.end))
    )
    whole = f"(SELECT *, TRUE AS is_there FROM {parquet(rows)} WHERE {bounds})"
    short = f"(SELECT *, TRUE AS is_there FROM {PROBED} WHERE {bounds})"
    described = con.execute(f"DESCRIBE {PROBED}").fetchall()
    values = {row[0]: row[1] for row in described if row[0] not in key}
    differs = {c: _differs(sql_name(c), kind) for c, kind in values.items()}
    one_is_absent = "w.is_there IS DISTINCT FROM s.is_there"
    counted = ", ".join(f"count(*) FILTER ({test})" for test in (one_is_absent, *differs.values()))
    joined = f"FROM {whole} AS w FULL JOIN {short} AS s USING ({names(key)})"
    total, absent, *numbers = con.execute(f"SELECT count(*), {counted} {joined}").fetchall()[0]
    columns = {c: n for c, n in zip(differs, numbers, strict=True) if n}
    if not absent and not columns:
        return
    worst = max(columns, key=lambda column: columns[column], default=next(iter(differs)))
    example = con.execute(
        f"SELECT {names(key)}, w.{sql_name(worst)}, s.{sql_name(worst)} {joined} "
        f"WHERE {one_is_absent if absent and not columns else differs[worst]} "
        f"ORDER BY {names(key)} LIMIT 1"
    ).fetchall()[0]
    raise ConfigurationError(_sentence(table, total, absent, columns, worst, example))


def _differs(column: str, kind: str) -> str:
    """SQL condition that a value is another one; of rows that both sides have."""
    both = "w.is_there AND s.is_there AND"
    if kind not in ("FLOAT", "DOUBLE"):
        return f"({both} w.{column} IS DISTINCT FROM s.{column})"
    close = f"abs(w.{column} - s.{column}) <= {RELATIVE} * greatest(1, abs(w.{column}))"
    return f"({both} w.{column} IS DISTINCT FROM s.{column} AND NOT coalesce({close}, FALSE))"


def _sentence(
    table: FeatureTable,
    total: int,
    absent: int,
    columns: dict[str, int],
    worst: str,
    example: tuple[object, ...],
) -> str:
    *keys, moment, whole, short = example
    entity = ", ".join(
        f"{name} {value}" for name, value in zip(table.entity_keys, keys, strict=True)
    )
    at = moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%MZ") if isinstance(moment, datetime) else ""
    seen = [f"{name} differs in {number:,}" for name, number in list(columns.items())[:3]]
    seen += [f"{absent:,} are there on one side only"] if absent else []
    return (
        f"feature table {table.name}: lookback_hours: {table.lookback_hours} is too short for "
        f"{table.sql}. Of its {total:,} newest rows, computed again from raw rows of their last "
        f"{table.lookback_hours} hours alone, {'; '.join(seen)}: {worst} of {entity} at {at} is "
        f"{short} then, and {whole} with all raw rows. A refresh of single hours would give other "
        "values than training had. Declare the hours that the query reads, or bound them in the "
        "query. Nothing was published"
    )
