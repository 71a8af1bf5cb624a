"""What a file holds that somebody wants a model of: its rows as a run would read them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path

import duckdb

from falaj.onboarding.findings import did_you_mean
from tasks.contracts.base import TimeWindow
from tasks.features.config import FeatureConfig
from tasks.features.offline.duck import duckdb_session, names, parquet, sql_name
from tasks.features.tables.landing import land_raw_rows
from tasks.features.tables.raw_files import RawTable
from tasks.features.tables.sniffing import EVER, SniffedColumn, SniffedTable, table_name
from tasks.kernel.errors import ConfigurationError, DataContractError
from tasks.kernel.files import scratch_folder
from tasks.kernel.settings import ArtifactStore

FEW = 20


@dataclass(frozen=True)
class Rows:
    """A described table with its typed rows in a database, as the view `rows`."""

    con: duckdb.DuckDBPyConnection
    table: RawTable
    sniffed: SniffedTable
    time: SniffedColumn
    label: SniffedColumn
    zone: str
    """Where days begin, and of times that are written without a zone."""
    first: datetime
    last: datetime

    @property
    def moment(self) -> str:
        """SQL of a row's time."""
        return sql_name(self.time.name)

    def one(self, query: str) -> tuple[object, ...]:
        """The only row of a query."""
        return self.con.execute(query).fetchall()[0]

    def values(self, column: str) -> list[object]:
        """Values of a column, the most frequent first; a few."""
        name = sql_name(column)
        found = self.con.execute(
            f"SELECT {name} FROM rows WHERE {name} IS NOT NULL GROUP BY 1 "
            f"ORDER BY count(*) DESC, 1 LIMIT {FEW}"
        ).fetchall()
        return [row[0] for row in found]


def column_called(sniffed: SniffedTable, name: str, option: str) -> SniffedColumn:
    """The column that somebody means, by its name in the file or the one proposed for it.

    Raises:
        ConfigurationError: there is none; the sentence lists those there are.
    """
    found = next((c for c in sniffed.columns if name in (c.written, c.name)), None)
    if found is None:
        listed = [c.written for c in sniffed.columns]
        raise ConfigurationError(
            f"{option} {name}: the data has no such column. {did_you_mean(name, listed)}It has "
            f"{', '.join(listed)}. Nothing was written"
        )
    return found


def time_column(sniffed: SniffedTable, name: str | None) -> SniffedColumn:
    """The column with the moment of a row.

    Raises:
        ConfigurationError: none is named and not exactly one holds times, or the one named does
            not hold times.
    """
    times = [column for column in sniffed.columns if column.type == "TIMESTAMPTZ"]
    listed = ", ".join(c.written for c in times) or "none"
    if name is None and len(times) != 1:
        raise ConfigurationError(
            f"which column says when a row happened? Name it with --time; {listed} hold(s) times. "
            "Nothing was written"
        )
    found = column_called(sniffed, name, "--time") if name else times[0]
    if found not in times:
        raise ConfigurationError(
            f"--time {name} holds {', '.join(map(repr, found.examples)) or 'nothing'}; expected "
            f"times such as 2024-01-31 15:00, year first. Columns with times: {listed}. Write the "
            "file with such times. Nothing was written"
        )
    return found


@contextmanager
def landed(
    uri: str, sniffed: SniffedTable, time: SniffedColumn, label: SniffedColumn, zone: str
) -> Iterator[Rows]:
    """The typed rows of the data, described as `falaj init` proposes it; without a key yet.

    Raises:
        DataContractError: a value beyond those that were looked at is of another type, or no row
            has a time.
    """
    table = RawTable(
        name=table_name(uri),
        uri=uri,
        columns={column.name: column.type for column in sniffed.columns},
        rename=sniffed.rename,
        key=(time.name,),
        time_column=time.name,
        time_zone=None if time.has_zone else zone,
        null_text=sniffed.null_text,
    )
    window = TimeWindow(start=EVER.start, end=datetime.now(UTC))
    with scratch_folder("falaj-init-") as folder, duckdb_session(folder) as con:
        store = ArtifactStore(folder / "artifacts")
        config = FeatureConfig.model_construct(raw_tables=(table,))
        ref = land_raw_rows(window, config, Path.cwd(), store, reused=False).tables[0]
        con.execute(f"CREATE VIEW rows AS FROM {parquet(store.path(ref.artifact, verify=False))}")
        moment = sql_name(time.name)
        first, last = con.execute(f"SELECT min({moment}), max({moment}) FROM rows").fetchall()[0]
        if first is None:
            raise DataContractError(
                f"no row has a time in {time.written} that is past; expected when each row "
                "happened. Nothing was written"
            )
        yield Rows(con, table, sniffed, time, label, zone, first, last)


def row_key(rows: Rows, entity: str | None) -> tuple[str, ...]:
    """Columns that name one row: one by itself, or the fewest with the time.

    Raises:
        DataContractError: none do, so rows stand in the data twice.
    """
    columns, time = rows.sniffed.columns, rows.time.name
    alone = [
        c.name
        for c in sorted(columns, key=lambda c: not c.name.endswith("id"))
        if c.type in ("BIGINT", "VARCHAR") and c.num_distinct >= rows.sniffed.num_rows
    ]
    others = [c.name for c in columns if c.name not in (time, entity) and not c.num_missing]
    start = (time, *([entity] if entity else []))
    more = [(), *((c,) for c in others), *combinations(others[:8], 2)]
    for key in dict.fromkeys([*((c,) for c in alone), (time,), *((*start, *m) for m in more)]):
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


def step_of(rows: Rows, entity: str | None) -> timedelta:
    """Time from one row of a series to the next, most of the time; in whole minutes."""
    by = f"PARTITION BY {sql_name(entity)} " if entity else ""
    found = rows.one(
        f"SELECT mode(epoch({rows.moment} - before) / 60)::BIGINT FROM (SELECT *, "
        f"lag({rows.moment}) OVER ({by}ORDER BY {rows.moment}) AS before FROM rows)"
    )[0]
    return timedelta(minutes=max(1, found) if isinstance(found, int) else 1)
