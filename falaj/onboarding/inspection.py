"""What a file holds that somebody wants a model of: its rows as a run would read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path

import duckdb

from tasks.contracts.base import TimeWindow
from tasks.features.config import FeatureConfig
from tasks.features.offline.duck import duckdb_session, names, parquet, sql_name
from tasks.features.tables.landing import land_raw_rows
from tasks.features.tables.raw_files import RawTable
from tasks.features.tables.sniffing import SniffedColumn, SniffedTable
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.files import scratch_folder
from tasks.kernel.settings import ArtifactStore

OLDEST = datetime(1950, 1, 1, tzinfo=UTC)
FEW = 20


@dataclass(frozen=True)
class Rows:
    """A described table with its typed rows in a database, as the view `rows`."""

    con: duckdb.DuckDBPyConnection
    table: RawTable
    sniffed: SniffedTable

    def one(self, query: str) -> tuple[object, ...]:
        """The only row of a query."""
        return self.con.execute(query).fetchall()[0]

    def values(self, column: str) -> list[tuple[object, int]]:
        """Values of a column with their numbers of rows, the most frequent first; a few."""
        name = sql_name(column)
        return self.con.execute(
            f"SELECT {name}, count(*) FROM rows WHERE {name} IS NOT NULL GROUP BY 1 "
            f"ORDER BY 2 DESC, 1 LIMIT {FEW}"
        ).fetchall()


def column_called(sniffed: SniffedTable, name: str, option: str) -> SniffedColumn:
    """The column that somebody means, by its name in the file or the one proposed for it.

    Raises:
        ConfigurationError: there is none; the sentence lists those there are.
    """
    found = [c for c in sniffed.columns if name in (c.written, c.name)]
    if not found:
        from falaj.onboarding.findings import did_you_mean

        near = did_you_mean(name, (c.written for c in sniffed.columns))
        raise ConfigurationError(
            f"{option} {name}: the data has no such column. {near}It has "
            f"{', '.join(c.written for c in sniffed.columns)}. Nothing was written"
        )
    return found[0]


def time_column(sniffed: SniffedTable, name: str | None) -> SniffedColumn:
    """The column with the moment of a row.

    Raises:
        ConfigurationError: none is named and not exactly one holds times, or the one named does
            not hold times.
    """
    times = [column for column in sniffed.columns if column.type == "TIMESTAMPTZ"]
    listed = ", ".join(c.written for c in times) or "none"
    if name is None:
        if len(times) == 1:
            return times[0]
        raise ConfigurationError(
            f"which column says when a row happened? Name it with --time; {listed} hold(s) times. "
            "Nothing was written"
        )
    found = column_called(sniffed, name, "--time")
    if found.type != "TIMESTAMPTZ":
        raise ConfigurationError(
            f"--time {name} holds {', '.join(map(repr, found.examples)) or 'nothing'}; expected "
            f"times such as 2024-01-31 15:00, year first. Columns with times: {listed}. Write the "
            "file with such times. Nothing was written"
        )
    return found


@contextmanager
def landed(path: Path, sniffed: SniffedTable, time: SniffedColumn, zone: str) -> Iterator[Rows]:
    """The typed rows of the data, described as `falaj init` proposes it; without a key yet.

    Raises:
        DataContractError: a value beyond those that were looked at is of another type.
    """
    table = RawTable(
        name=table_name(path),
        uri=str(path),
        columns={column.name: column.type for column in sniffed.columns},
        rename=sniffed.rename,
        key=(time.name,),
        time_column=time.name,
        time_zone=None if time.has_zone else zone,
        null_text=sniffed.null_text,
    )
    window = TimeWindow(start=OLDEST, end=datetime.now(UTC))
    with scratch_folder("falaj-init-") as folder, duckdb_session(folder) as con:
        store = ArtifactStore(folder / "artifacts")
        config = FeatureConfig.model_construct(raw_tables=(table,))
        ref = land_raw_rows(window, config, path.parent, store).tables[0]
        rows = parquet(store.path(ref.artifact, verify=False))
        con.execute(f"CREATE VIEW rows AS SELECT * FROM {rows}")
        yield Rows(con, table, sniffed)


def table_name(path: Path) -> str:
    """Name of the raw table: that of the file or folder."""
    from tasks.features.tables.raw_files import column_name

    stem = path.name.partition(".")[0].partition("*")[0]
    return column_name(stem) if stem else "events"


def row_key(rows: Rows, time: str, entity: str | None) -> tuple[str, ...]:
    """Columns that name one row: one by itself, or the fewest with the time.

    Raises:
        DataContractError: none do, so rows stand in the data twice.
    """
    columns = rows.sniffed.columns
    alone = [c for c in columns if c.type in ("BIGINT", "VARCHAR") and not c.num_missing]
    alone.sort(key=lambda c: not c.name.endswith("id"))
    others = [c.name for c in columns if c.name not in (time, entity) and not c.num_missing]
    start = (time, *([entity] if entity else []))
    tried: list[tuple[str, ...]] = [(c.name,) for c in alone if c.num_distinct >= _known(rows)]
    tried += [(time,), start, *((*start, c) for c in others)]
    tried += [(*start, *pair) for pair in combinations(others[:8], 2)]
    for key in dict.fromkeys(tried):
        if rows.one(f"SELECT count(DISTINCT ({names(list(key))})) = count(*) FROM rows")[0]:
            return key
    shared = names(list(start))
    number, example = rows.one(
        f"SELECT count(*), any_value(k) FROM (SELECT row({shared})::VARCHAR AS k FROM rows "
        f"GROUP BY {shared} HAVING count(*) > 1)"
    )
    raise DataContractError(
        f"no column, and no three with {time}, name one row: {number:,} values of {shared} stand "
        f"in several rows, such as {example}. Remove the copies, or add a column that numbers the "
        "rows. Nothing was written"
    )


def _known(rows: Rows) -> int:
    return rows.sniffed.num_rows


def step_minutes(rows: Rows, time: str, entity: str | None) -> int:
    """Minutes from one row of a series to the next, most of the time."""
    by = f"PARTITION BY {sql_name(entity)} " if entity else ""
    found = rows.one(
        f"SELECT mode(epoch({sql_name(time)} - before) / 60)::BIGINT FROM (SELECT *, "
        f"lag({sql_name(time)}) OVER ({by}ORDER BY {sql_name(time)}) AS before FROM rows)"
    )[0]
    return max(1, found) if isinstance(found, int) else 1
