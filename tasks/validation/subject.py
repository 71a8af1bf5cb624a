"""The table under a suite, read by DuckDB: its types, derived columns, aggregates and frames."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pandas as pd
import pyarrow as pa

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import ConfigurationError, DataContractError, StorageError
from tasks.kernel.files import scratch_folder
from tasks.validation.baseline import DAYS, Baseline, judge_days, literal, quoted
from tasks.validation.suites import SUBJECT, ColumnKind, Suite

MEMORY_LIMIT = "1GB"
SMALL_ROWS = 50_000

_INTEGERS = (
    *("BIGINT", "INTEGER", "SMALLINT", "TINYINT", "HUGEINT"),
    *("UBIGINT", "UINTEGER", "USMALLINT", "UTINYINT", "UHUGEINT"),
)
_FLOATS = ("DOUBLE", "FLOAT", "DECIMAL")


class _Kind(NamedTuple):
    """What a declared kind means, and DuckDB's types of it, the first of which stands for it."""

    words: str
    types: tuple[str, ...]


_KINDS: dict[ColumnKind, _Kind] = {
    "text": _Kind("text", ("VARCHAR",)),
    "integer": _Kind("whole numbers", _INTEGERS),
    "number": _Kind("numbers", (*_FLOATS, *_INTEGERS)),
    "boolean": _Kind("true or false", ("BOOLEAN",)),
    # Other resolutions have types of their own, which Feast cannot cast.
    "timestamp": _Kind("moments with a time zone, in microseconds", ("TIMESTAMP WITH TIME ZONE",)),
}


class Subject:
    """One table, open for reading; made by `open_subject`."""

    def __init__(
        self, con: duckdb.DuckDBPyConnection, suite: Suite, name: str, source: str
    ) -> None:
        self._con = con
        self.suite = suite
        self._name = name
        self._source = source
        self.column_types = self._describe(source)
        self.num_rows = int(con.execute(f"SELECT count(*) FROM {source}").fetchall()[0][0])
        self._columns: dict[str, dict[str, str]] = {}

    def table_faults(self) -> list[str]:
        """What is wrong with the table as such, before any value is looked at."""
        if not self.num_rows:
            return [f"{self._name} has no rows, expected at least one"]
        declared = {name: kind for kind, names in self.suite.columns.items() for name in names}
        faults = []
        if missing := [name for name in declared if name not in self.column_types]:
            faults.append(
                f"column(s) {', '.join(missing)} are missing, the table has "
                f"{', '.join(self.column_types)}"
            )
        other = [name for name in self.column_types if name not in declared]
        if other:
            faults.append(f"column(s) {', '.join(other)} are not among those the suite allows")
        for name, kind in declared.items():
            seen = self.column_types.get(name)
            if seen is not None and not is_of_kind(seen, kind):
                faults.append(self._wrong_type(name, seen, kind))
        return faults

    def derive(self, references: Mapping[str, Path] | None = None) -> dict[str, set[str]]:
        """Compute derived columns and aggregates; returns the columns of every table by its name.

        Args:
            references: Parquet of other tables that the suite's SQL may read.

        Raises:
            ConfigurationError: an expression or query of the suite is wrong.
            DataContractError: an aggregate meets a value that its query cannot work with.
        """
        self._refer(references or {})
        self._derive_columns()
        for name, query in self.suite.aggregates.items():
            self._make(
                f"TABLE {quoted(name)} AS FROM ({query}) ORDER BY ALL", f"aggregate {name!r}"
            )
        tables = [SUBJECT, *self.suite.aggregates]
        if self.suite.baseline:
            self._judge_days(self.suite.baseline)
            tables.append(DAYS)
        self._columns = {table: self._describe(quoted(table)) for table in tables}
        return {table: set(columns) for table, columns in self._columns.items()}

    def _refer(self, references: Mapping[str, Path]) -> None:
        """Make other tables readable by name: with the columns the suite needs, and no others."""
        for name, columns in self.suite.references.items():
            kinds = [(quoted(column), kind) for kind, names in columns.items() for column in names]
            what = f"reference {name!r}"
            if path := references.get(name):
                selected = ", ".join(column for column, _ in kinds)
                source = _source(self._con, path, name)
                self._make(f"VIEW {quoted(name)} AS SELECT {selected} FROM {source}", what)
            else:
                typed = ", ".join(f"{column} {_KINDS[kind].types[0]}" for column, kind in kinds)
                self._make(f"TABLE {quoted(name)} ({typed})", what)

    def _derive_columns(self) -> None:
        """Make the subject readable with its derived columns, each a view over those before it."""
        source = self._source
        for number, (name, expression) in enumerate(self.suite.derived.items()):
            derived = f"VIEW derived_{number} AS SELECT *, ({expression}) AS {quoted(name)}"
            self._make(f"{derived} FROM {source}", f"derived column {name!r}")
            source = f"derived_{number}"
        made = f"{SUBJECT} AS FROM {source}"
        try:  # a table is computed once, a view each time
            self._make(f"{'TABLE' if self.num_rows <= SMALL_ROWS else 'VIEW'} {made}", "subject")
        except DataContractError:  # raised later, with the name of the column that is asked for
            self._make(f"VIEW {made}", "subject")

    def _judge_days(self, baseline: Baseline) -> None:
        """Make the table of days from the bands of the baseline."""
        types = self._describe(SUBJECT)
        numeric = {name for name, kind in types.items() if is_of_kind(kind, "number")}
        with self._mistakes_explained("bands of the baseline"):
            rows = judge_days(baseline, SUBJECT, numeric, self.query)
        names = ("period", *baseline.columns)
        columns = zip(*rows, strict=True) if rows else [()] * len(names)
        table = pa.table([pa.array(column, pa.string()) for column in columns], names)
        self._con.register("judged_days", table)  # row by row would take as long as judging
        self._make(f"TABLE {DAYS} AS FROM judged_days", "table of days")

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """Rows of a query over the subject and its aggregates."""
        return self._con.execute(statement).fetchall()

    def rows_of(self, table: str) -> int:
        """Rows of the subject or of an aggregate."""
        return int(self.query(f"SELECT count(*) FROM {quoted(table)}")[0][0])

    def frame(self, table: str, columns: Sequence[str]) -> pd.DataFrame:
        """The columns, in the stored order of rows; nothing else is loaded.

        Floats come as float64 and integers as int64, because Great Expectations compares any other
        number type value by value in Python; text comes as categories, to save memory.

        Raises:
            DataContractError: a derived column meets a value that it cannot be computed from.
        """
        types = self._columns[table]
        wanted = list(columns) or list(types)[:1]  # a count of rows needs some column
        selected = ", ".join(_widened(name, types[name]) for name in wanted)
        with self._mistakes_explained(f"column(s) {', '.join(wanted)}"):
            arrow = self._con.sql(f"SELECT {selected} FROM {quoted(table)}").to_arrow_table()
        frame: pd.DataFrame = arrow.to_pandas(
            strings_to_categorical=True, split_blocks=True, self_destruct=True
        )
        return frame

    def _describe(self, relation: str) -> dict[str, str]:
        return {str(row[0]): str(row[1]) for row in self.query(f"DESCRIBE FROM {relation}")}

    def _wrong_type(self, name: str, seen: str, kind: ColumnKind) -> str:
        fault = f"{name} is {seen}, expected {_KINDS[kind].words}"
        if seen != "VARCHAR" or kind not in ("integer", "number"):
            return fault
        column = quoted(name)
        misfits = self.query(
            f"SELECT min({column}) FROM {self._source} WHERE TRY_CAST({column} AS DOUBLE) IS NULL"
        )[0][0]
        return f"{fault}; it holds {misfits!r}" if misfits else f"{fault}; its numbers are text"

    def _make(self, thing: str, what: str) -> None:
        with self._mistakes_explained(what):
            self._con.execute(f"CREATE OR REPLACE TEMP {thing}")

    @contextmanager
    def _mistakes_explained(self, what: str) -> Iterator[None]:
        """Tell a mistake in the suite's SQL from a value that correct SQL cannot work with."""
        try:
            yield
        except (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException) as exc:
            raise ConfigurationError(
                f"suite file expectations/{self.suite.suite}.yaml, {what}: the SQL is wrong "
                f"({_reason(exc)}). Mend the file. Nothing was judged"
            ) from exc
        except (duckdb.DataError, duckdb.InvalidInputException) as exc:
            raise DataContractError(
                f"{what} of {self._name} cannot be computed, a value does not fit ({_reason(exc)})"
            ) from exc


@contextmanager
def open_subject(path: Path, name: str, suite: Suite, window: TimeWindow) -> Iterator[Subject]:
    """Open a Parquet file, or all Parquet files under a folder, as the subject of a suite.

    One thread: sums of floats then come out alike in every run. What does not fit in memory spills
    to a temporary folder that goes away.

    Raises:
        DataContractError: it is no Parquet, or its files differ in columns.
        StorageError: neither memory nor the disk has room for what the suite asks.
    """
    with scratch_folder("falaj-validation") as spill, duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        con.execute("SET enable_progress_bar = false")
        con.execute("SET threads = 1")
        con.execute(f"SET memory_limit = {literal(MEMORY_LIMIT)}")
        con.execute(f"SET temp_directory = {literal(spill)}")
        con.execute(f"SET VARIABLE window_start = {literal(window.start)}")
        con.execute(f"SET VARIABLE window_end = {literal(window.end)}")
        try:
            yield Subject(con, suite, name, _source(con, path, name))
        except (duckdb.IOException, duckdb.OutOfMemoryException) as exc:
            raise StorageError(
                f"{name}: suite {suite.suite!r} could not be judged ({_reason(exc)}); expected "
                f"free space in {spill}, beside {MEMORY_LIMIT} of memory. Free some and run again"
            ) from exc


def is_of_kind(duckdb_type: str, kind: ColumnKind) -> bool:
    """True where values of a stored type are of the declared kind."""
    return _base(duckdb_type) in _KINDS[kind].types


def _base(duckdb_type: str) -> str:
    """A type without its precision."""
    return duckdb_type.partition("(")[0]


def _source(con: duckdb.DuckDBPyConnection, path: Path, name: str) -> str:
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise DataContractError(f"{name}: folder {path.name} holds no Parquet file")
    schemas = {str(_columns_of(con, file, name)): file.name for file in files}
    if len(schemas) > 1:
        raise DataContractError(
            f"{name}: {' and '.join(schemas.values())} differ in their columns, or in the columns' "
            f"types or order: {' against '.join(schemas)}"
        )
    return (
        f"read_parquet([{', '.join(literal(file) for file in files)}], hive_partitioning = false)"
    )


def _columns_of(con: duckdb.DuckDBPyConnection, file: Path, name: str) -> dict[str, str]:
    try:
        rows = con.execute(f"DESCRIBE FROM read_parquet({literal(file)})").fetchall()
    except duckdb.Error as exc:
        raise DataContractError(
            f"{name}: {file.name} cannot be read as Parquet ({_reason(exc)})"
        ) from exc
    return {str(row[0]): str(row[1]) for row in rows}


def _widened(name: str, duckdb_type: str) -> str:
    column = quoted(name)
    if _base(duckdb_type) in _FLOATS:
        return f"{column}::DOUBLE AS {column}"
    if duckdb_type in _INTEGERS:
        wide = "DOUBLE" if "HUGEINT" in duckdb_type or duckdb_type == "UBIGINT" else "BIGINT"
        return f"{column}::{wide} AS {column}"
    return column


def _reason(exc: duckdb.Error) -> str:
    return " ".join(str(exc).split())
