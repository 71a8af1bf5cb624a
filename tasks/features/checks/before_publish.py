"""Whether a new version of the feature tables may be: what its queries read, what its rows are.

Whether a feature query reads the raw rows that its table may read, and no others.

No older ones than `lookback_hours`: a refresh of a few hours gives a query only these, and if it
reads older ones, its values online are others than those that a model was trained on. No later ones
than the moment from which its values are known: a model that learns from them knows the future.

Some rows are computed again with the others hidden, and must come out the same.

And whether landed rows continue the published tables, or are other data under the same name.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureTables, LandedRows, TableRef
from tasks.features.config import FeatureConfig, FeatureTable
from tasks.features.offline.duck import inside, names, parquet, sql_name
from tasks.features.tables.raw_files import RawTable
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import ArtifactStore

NEWEST_ROWS = 1000
"""So many of a table's newest rows are computed again, and at most a tenth of those of the window:
a bound on what the check costs, and on how much of the past the window itself has left."""
LEAST_WINDOW = timedelta(days=1)
"""A shorter window gives a query hardly more rows than its lookback."""
RELATIVE = 1e-6
"""Sums of the same rows in another order differ by rounding, far less than this."""
PROBED = "probed"
MIN_ROWS = 20
"""Published rows of a window below which nothing is said of their keys."""
MIN_SHARE = 0.1
"""Share of the published rows' keys that has to land again. A correction replaces values."""
SHOWN = 12


@dataclass(frozen=True)
class Probe:
    """Which rows of a table are computed again, from which raw rows, and what it means."""

    part: TimeWindow | None
    """Window of the rows; None for a static table, whose rows are all compared."""
    since: datetime | None
    """Raw rows before this are hidden; None for those that were hidden before already."""
    until: datetime | None
    """Raw rows from this moment on are hidden."""
    fault: str
    """What it shows where values are others then."""
    cure: str


def probes(
    con: duckdb.DuckDBPyConnection, table: FeatureTable, rows: Path, computed: TimeWindow
) -> Iterator[Probe]:
    """What to compute again of a table that was computed for a window; little of it."""
    if computed.end - computed.start < LEAST_WINDOW:
        return
    lookback = timedelta(hours=table.lookback_hours)
    late = (
        f"{table.origin} reads raw rows dated after the moment from which its values are known",
        "A model would learn from what is not known yet. Bound the query by the row's own moment; "
        "where such rows are known ahead, as a timetable is, declare known_ahead_hours",
    )
    if table.static:
        middle = computed.start + (computed.end - computed.start) / 2
        yield Probe(None, None, middle, *late)
        return
    if newest := _newest_part(con, rows, computed):
        yield Probe(
            newest,
            newest.start - lookback,
            None,
            f"lookback_hours: {table.lookback_hours} is too short for {table.origin}",
            "A refresh of single hours would give other values than training had. Declare the "
            "hours that the query reads, or bound them in the query",
        )
    if earlier := _newest_part(con, rows, _first_half(con, rows, computed)):
        until = earlier.end + timedelta(hours=table.known_ahead_hours)
        yield Probe(earlier, earlier.start - lookback, until, *late)


def _first_half(
    con: duckdb.DuckDBPyConnection, rows: Path, computed: TimeWindow
) -> TimeWindow | None:
    """The part of a window with the older half of its rows; None where they are of one moment."""
    found = con.execute(
        f"SELECT quantile_disc(event_timestamp, 0.5) FROM {parquet(rows)} "
        "WHERE event_timestamp > ?::TIMESTAMPTZ AND event_timestamp < ?::TIMESTAMPTZ",
        [computed.start, computed.end],
    ).fetchall()[0][0]
    return found and TimeWindow(start=computed.start, end=found.astimezone(UTC))


def _newest_part(
    con: duckdb.DuckDBPyConnection, rows: Path, computed: TimeWindow | None
) -> TimeWindow | None:
    """The end of a computed window that holds a table's newest rows; None where it has none."""
    if computed is None:
        return None
    found = con.execute(
        f"WITH dated AS (SELECT event_timestamp FROM {parquet(rows)} "
        f"WHERE {inside('event_timestamp', computed)}) "
        "SELECT min(event_timestamp) FROM (FROM dated ORDER BY event_timestamp DESC "
        f"LIMIT (SELECT least({NEWEST_ROWS}, ceil(count(*) / 10))::BIGINT FROM dated))"
    ).fetchall()[0][0]
    return found and TimeWindow(start=found.astimezone(UTC), end=computed.end)


def check_same_rows(
    con: duckdb.DuckDBPyConnection, table: FeatureTable, rows: Path, probe: Probe
) -> None:
    """Compare rows that were computed from all raw rows with those of `probed`.

    Args:
        con: holds `probed`, what the query gives where some raw rows are hidden from it.
        table: whose query is in question.
        rows: folder of its rows as they are to be published.
        probe: what was hidden.

    Raises:
        ConfigurationError: they differ, so the query reads what was hidden.
    """
    key = [*table.entity_keys, "event_timestamp"]
    bounds = "TRUE" if probe.part is None else inside("event_timestamp", probe.part)
    whole = f"(SELECT *, TRUE AS is_there FROM {parquet(rows)} WHERE {bounds})"
    again = f"(SELECT *, TRUE AS is_there FROM {PROBED} WHERE {bounds})"
    described = con.execute(f"DESCRIBE {PROBED}").fetchall()
    differs = {n: _differs(sql_name(n), kind) for n, kind, *_ in described if n not in key}
    # Of a static table, rows may come with the raw rows that were hidden.
    one_is_absent = "w.is_there IS DISTINCT FROM s.is_there" if probe.part else "FALSE"
    counted = ", ".join(f"count(*) FILTER ({sql})" for sql in (one_is_absent, *differs.values()))
    total, absent, *numbers = con.execute(
        f"SELECT count(*), {counted} FROM {whole} AS w FULL JOIN {again} AS s USING ({names(key)})"
    ).fetchall()[0]
    seen = [f"{c} differs in {n:,}" for c, n in zip(differs, numbers, strict=True) if n]
    seen += [f"{absent:,} are there on one side only"] if absent else []
    if seen:
        hidden = " or ".join(
            f"{side} {moment.astimezone(UTC):%Y-%m-%dT%H:%MZ}"
            for side, moment in (("before", probe.since), ("from", probe.until))
            if moment
        )
        raise ConfigurationError(
            f"feature table {table.name}: {probe.fault}. {total:,} rows were computed again "
            f"without raw rows {hidden}: {'; '.join(seen)}. {probe.cure}. Nothing was published"
        )


def _differs(column: str, kind: str) -> str:
    """SQL condition that a value is another one; of rows that both sides have."""
    both = "w.is_there AND s.is_there AND"
    if kind not in ("FLOAT", "DOUBLE"):
        return f"({both} w.{column} IS DISTINCT FROM s.{column})"
    close = f"abs(w.{column} - s.{column}) <= {RELATIVE} * greatest(1, abs(w.{column}))"
    return f"({both} w.{column} IS DISTINCT FROM s.{column} AND NOT coalesce({close}, FALSE))"


def check_same_data(
    landed: LandedRows, base: FeatureTables, config: FeatureConfig, store: ArtifactStore
) -> None:
    """See that rows about to be merged into the published tables are of the same data.

    Two data sets under one name of a use case would be mixed in its tables and its online values.

    Raises:
        ConfigurationError: they are not, and the configuration does not adopt these tables.
    """
    if not base.raw or (config.adopts and base.version.startswith(config.adopts)):
        return
    published = {ref.name: ref for ref in base.raw}
    common = [
        (table, published[table.name], ref)
        for table, ref in zip(config.raw_tables, landed.tables, strict=True)
        if table.name in published
    ]
    reasons = [_why_other(*tables, landed.window, store) for tables in common]
    reasons += [] if common else [f"none of the published raw tables {', '.join(published)} landed"]
    for reason in filter(None, reasons):
        raise ConfigurationError(
            f"{reason}. Rows of two data sets would be mixed in the tables and the online values. "
            "Give the new data a `name` of its own in use_case.yaml, or another state folder "
            "(FALAJ_HOME); where they do continue these tables, set features.adopts: "
            f"{base.version[:SHOWN]}. Nothing was published"
        )


def _why_other(
    table: RawTable, before: TableRef, landed: TableRef, window: TimeWindow, store: ArtifactStore
) -> str:
    """Why a landed table is not the published one; empty where it may be."""
    old, new = (parquet(store.path(ref.artifact)) for ref in (before, landed))
    key = list(dict.fromkeys((*table.key, *([table.time_column] if table.time_column else []))))
    # As text: a column may have another type by now.
    texts = ", ".join(f"{sql_name(c)}::VARCHAR AS {sql_name(c)}" for c in key)
    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        held = [row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {old}").fetchall()]
        if absent := [column for column in key if column not in held]:
            return f"raw table {table.name}: the published rows have no {', '.join(absent)}"
        if table.time_column is None:
            return ""
        num_old, num_again = con.execute(
            f"WITH old AS (SELECT DISTINCT {texts} FROM {old} "
            f"WHERE {inside(table.time_column, window)}), new AS (SELECT {texts} FROM {new}) "
            f"SELECT count(*), (SELECT count(*) FROM old SEMI JOIN new USING ({names(key)})) "
            "FROM old"
        ).fetchall()[0]
    if num_old < MIN_ROWS or num_again >= MIN_SHARE * num_old:
        return ""
    return (
        f"raw table {table.name}: of {num_old:,} published rows in {window}, {num_again:,} are in "
        f"the file now (by {', '.join(key)})"
    )
