"""The rows that a historical retrieval is asked for, checked and made readable as one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import duckdb
import pandas as pd
import pyarrow as pa

from tasks.features.offline.duck import sql_name
from tasks.features.offline.source import utc_moment
from tasks.kernel.errors import FeatureStoreError

EVENT_TIME = "event_timestamp"
"""Name that Feast gives to the moment of an entity row."""

ROW = "__row"
"""Number of an entity row within one retrieval; reserved."""

NaiveTimes = Literal["utc", "refuse"]

_AWARE = {"TIMESTAMP WITH TIME ZONE", "TIMESTAMPTZ", "TIMESTAMPTZ_NS"}
_NAIVE = {"TIMESTAMP", "TIMESTAMP_NS", "TIMESTAMP_MS", "TIMESTAMP_S", "DATE"}
_WITH_OFFSET = r"\d{2}:\d{2}.*(Z|z|UTC|[+-]\d{2}(:?\d{2})?)$"


@dataclass
class Script:
    """The tables that one retrieval makes in its session, and the statements that made them."""

    con: duckdb.DuckDBPyConnection
    statements: list[str] = field(default_factory=list)

    def run(self, statement: str) -> None:
        """Run one statement and keep its text."""
        self.con.execute(statement)
        self.statements.append(statement)


@dataclass(frozen=True)
class EntityRows:
    """What the table `entities` of a session holds, beside the number of each row."""

    columns: dict[str, str]
    """Name to DuckDB type."""
    event_time: str
    num_rows: int


def load_entities(script: Script, given: pd.DataFrame | str, naive_times: NaiveTimes) -> EntityRows:
    """Make the entity rows readable as `entities`, each with a number, its moment in UTC.

    Times count in microseconds; finer parts are cut off. Rows with a null key or a null moment
    stay, and find no values.

    Args:
        script: of a session in UTC.
        given: a frame, or DuckDB SQL.
        naive_times: whether a time without a time zone counts as UTC or is refused.

    Raises:
        FeatureStoreError: the query is wrong, a column is missing, doubled or reserved, or the
            moments are no times.
    """
    con = script.con
    try:
        query = _readable(con, given)
        described = [row[:2] for row in con.execute(f"DESCRIBE {query}").fetchall()]
        check_names((name for name, _ in described), "the entity frame")
        columns = {name: str(kind) for name, kind in described}
        moment = _event_time(columns)
        script.run(f"CREATE TEMP VIEW asked AS {query}")
        if naive_times == "refuse":
            _refuse_naive(con, moment, columns[moment])
        script.run(
            "CREATE TEMP TABLE entities AS SELECT * REPLACE "
            f"({utc_moment(moment, columns[moment])} AS {sql_name(moment)}), "
            f"row_number() OVER () AS {ROW} FROM asked"
        )
    except duckdb.ConversionException as exc:
        raise FeatureStoreError(
            f"a value of the entity frame cannot be read as a time ({_first_line(exc)}); expected "
            "moments such as 2013-01-31T12:00:00Z"
        ) from exc
    except (duckdb.ProgrammingError, duckdb.InvalidInputException) as exc:
        raise FeatureStoreError(
            f"the entity query cannot be run ({_first_line(exc)}); expected one SELECT of DuckDB"
        ) from exc
    num_rows = con.execute("SELECT count(*) FROM entities").fetchall()[0][0]
    return EntityRows(columns, moment, int(num_rows))


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
        return _one_select(con, given)
    check_names((str(column) for column in given.columns), "the entity frame")
    try:
        table = pa.Table.from_pandas(given, preserve_index=False)
    except pa.ArrowException as exc:
        raise FeatureStoreError(
            f"the entity frame cannot be read ({exc}); expected one type in each column"
        ) from exc
    con.register("given", table)
    return "SELECT * FROM given"


def _one_select(con: duckdb.DuckDBPyConnection, text: str) -> str:
    statements = con.extract_statements(text)
    if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
        raise FeatureStoreError(
            f"the entity query has {len(statements)} statements or is no SELECT; expected one "
            "SELECT of DuckDB. Nothing was run"
        )
    return str(statements[0].query)


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


def seen_between(sources: Iterable[str]) -> str:
    """Entity rows of a retrieval without an entity frame, from one query for each view.

    Each query gives the key columns of its view and the moments of its rows. A combination of keys
    and moment comes once; a key that a view does not have is null in its rows.
    """
    queries = " UNION BY NAME ".join(f"({query})" for query in sources)
    return f"SELECT {sql_name(EVENT_TIME)}, * EXCLUDE ({sql_name(EVENT_TIME)}) FROM ({queries})"


def key_columns(entities: EntityRows) -> list[str]:
    """Columns of the entity frame other than its moment."""
    return [c for c in entities.columns if c != entities.event_time]


def _first_line(exc: Exception) -> str:
    return str(exc).split("\n", 1)[0]
