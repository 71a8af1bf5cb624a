"""The rows that a historical retrieval is asked for, checked and made readable as one table."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import duckdb
import pandas as pd
import pyarrow as pa

from tasks.features.offline.duck import first_line, names, sql_name
from tasks.kernel.errors import FeatureStoreError

EVENT_TIME = "event_timestamp"
"""Name that Feast gives to the moment of an entity row."""

ROW = "__row"
"""Number of an entity row within one retrieval; reserved."""

BLOCK_ROWS = 1 << 19
"""Entity rows that are matched at one time."""

NaiveTimes = Literal["utc", "refuse"]

_AWARE = {"TIMESTAMP WITH TIME ZONE", "TIMESTAMPTZ", "TIMESTAMPTZ_NS"}
_NAIVE = {"TIMESTAMP", "TIMESTAMP_NS", "TIMESTAMP_MS", "TIMESTAMP_S", "DATE"}
_WITH_OFFSET = r"\d{2}:\d{2}.*(Z|z|UTC|[+-]\d{2}(:?\d{2})?)$"


@dataclass
class EntityRows:
    """The view `entities` of a session, which is read once: each row with its number."""

    con: duckdb.DuckDBPyConnection
    columns: dict[str, str]
    """Name to DuckDB type."""
    event_time: str
    num_read: int = 0

    def blocks(self, order: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows in blocks, one at least, sorted by `order`.

        Raises:
            FeatureStoreError: a value cannot be read.
        """
        sorting = f"ORDER BY {names(list(order))}" if order else ""
        with _errors_explained():
            reader = self.con.sql(f"SELECT * FROM entities {sorting}").to_arrow_reader(BLOCK_ROWS)
            held, size = [pa.RecordBatch.from_pylist([], reader.schema)], 0
            for batch in reader:
                held.append(batch)
                size += batch.num_rows
                if size >= BLOCK_ROWS:
                    self.num_read += size
                    yield pa.concat_batches(held)
                    held, size = [held[0]], 0
            if size or not self.num_read:
                self.num_read += size
                yield pa.concat_batches(held)


def load_entities(
    con: duckdb.DuckDBPyConnection, given: pd.DataFrame | str, naive_times: NaiveTimes
) -> EntityRows:
    """Make the entity rows readable, each with a number and its moment in UTC.

    Times count in microseconds; finer parts are cut off. Rows with a null key or a null moment
    stay, and find no values.

    Args:
        con: a session in UTC.
        given: a frame, or DuckDB SQL.
        naive_times: whether a time without a time zone counts as UTC or is refused.

    Raises:
        FeatureStoreError: the query is wrong, a column is missing, doubled or reserved, or the
            moments are no times.
    """
    with _errors_explained():
        query = _readable(con, given)
        described = [row[:2] for row in con.execute(f"DESCRIBE {query}").fetchall()]
        check_names((name for name, _ in described), "the entity frame")
        columns = {name: str(kind) for name, kind in described}
        moment = _event_time(columns)
        con.execute(f"CREATE TEMP VIEW asked AS {query}")
        if naive_times == "refuse":
            _refuse_naive(con, moment, columns[moment])
        con.execute(
            "CREATE TEMP VIEW entities AS SELECT * REPLACE "
            f"({_utc_moment(moment, columns[moment])} AS {sql_name(moment)}), "
            f"row_number() OVER () AS {ROW} FROM asked"
        )
    return EntityRows(con, columns, moment)


@contextmanager
def _errors_explained() -> Iterator[None]:
    try:
        yield
    except (duckdb.OutOfMemoryException, duckdb.IOException):
        raise  # the session explains them
    except (duckdb.Error, OSError) as exc:  # Arrow hands on errors of a query as those of a file
        raise FeatureStoreError(
            f"the entity query cannot be run, or a value of the entity frame cannot be read as a "
            f"time ({first_line(exc)}); expected one SELECT of DuckDB, with moments such as "
            "2013-01-31T12:00:00Z"
        ) from exc


def check_names(columns: Iterable[str], where: str) -> None:
    """Refuse names that DuckDB could not tell apart, or that are reserved.

    Raises:
        FeatureStoreError: with the names.
    """
    counted = Counter(name.casefold() for name in columns)
    if doubled := sorted(name for name, count in counted.items() if count > 1):
        raise FeatureStoreError(
            f"column {', '.join(doubled)} comes more than once in {where}, upper and lower case "
            "being one; rename it, or ask for full feature names"
        )
    if ROW in counted:
        raise FeatureStoreError(f"column {ROW} of {where} is reserved; rename it")


def _readable(con: duckdb.DuckDBPyConnection, given: pd.DataFrame | str) -> str:
    if isinstance(given, str):
        statements = con.extract_statements(given)
        if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
            raise FeatureStoreError(
                f"the entity query has {len(statements)} statements or is no SELECT; expected one "
                "SELECT of DuckDB. Nothing was run"
            )
        return str(statements[0].query)
    check_names((str(column) for column in given.columns), "the entity frame")
    try:
        table = pa.Table.from_pandas(given, preserve_index=False)
    except pa.ArrowException as exc:
        raise FeatureStoreError(
            f"the entity frame cannot be read ({exc}); expected one type in each column"
        ) from exc
    con.register("given", table)
    return "SELECT * FROM given"


def _event_time(columns: dict[str, str]) -> str:
    """The column that holds the moments: by its name, else the only time, as Feast infers it."""
    times = [c for c, kind in columns.items() if kind in _AWARE | _NAIVE]
    if EVENT_TIME in columns:
        name = EVENT_TIME
    elif len(times) == 1:
        name = times[0]
    else:
        raise FeatureStoreError(
            f"the entity frame has no column {EVENT_TIME}; it has {', '.join(columns)}"
        )
    if columns[name] not in _AWARE | _NAIVE | {"VARCHAR", '"NULL"'}:
        raise FeatureStoreError(f"{name} of the entity frame is {columns[name]}, expected a time")
    return name


def _refuse_naive(con: duckdb.DuckDBPyConnection, column: str, kind: str) -> None:
    without = kind in _NAIVE
    if kind == "VARCHAR":
        text = sql_name(column)
        naive = f"{text} IS NOT NULL AND NOT regexp_matches(trim({text}), ?)"
        found = con.execute(f"SELECT count(*) FROM asked WHERE {naive}", [_WITH_OFFSET]).fetchall()
        without = found[0][0] > 0
    if without:
        raise FeatureStoreError(
            f"{column} of the entity frame has times without a time zone, which could be local "
            "ones; give them a zone, UTC for example. Nothing was retrieved"
        )


def _utc_moment(column: str, kind: str) -> str:
    """SQL of a time as a moment in UTC; nanoseconds, which a cast would round, are cut off."""
    if not kind.endswith("_NS"):
        return f"{sql_name(column)}::TIMESTAMPTZ"
    ns = f"epoch_ns({sql_name(column)})"
    return f"make_timestamp(({ns} - ({ns} % 1000 + 1000) % 1000) // 1000)::TIMESTAMPTZ"
