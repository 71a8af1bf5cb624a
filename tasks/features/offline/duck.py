"""DuckDB connections of this room: bounded memory, UTC, spill to a folder that goes away."""

from __future__ import annotations  # held classes of DuckDB are told of as leaks at the end

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import duckdb

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import ArtifactError, StorageError
from tasks.kernel.files import scratch_folder

LARGEST_NUMBER = 3.4028234663852886e38
"""Models take 32-bit floats, in which anything beyond this is infinite."""
NUMBERS = (
    *("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "FLOAT", "DOUBLE"),
    *("UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "UHUGEINT"),
)
"""DuckDB's types of numbers, beside DECIMAL."""
ABSENT = "No files found that match the pattern"


MEMORY_LIMIT_MB = 3000


@contextmanager
def duckdb_session(
    spill_parent: Path, *, memory_limit_mb: int = MEMORY_LIMIT_MB, threads: int = 2
) -> Iterator[duckdb.DuckDBPyConnection]:
    """A private in-memory database in UTC that spills under `spill_parent` when memory is short.

    Raises:
        ArtifactError: files that a query reads are gone.
        StorageError: the disk refused a write.
    """
    spill_parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(".spill", spill_parent) as spill, duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        # A notebook without ipywidgets has no bar, and DuckDB refuses any word about one.
        if con.execute("SELECT current_setting('enable_progress_bar')").fetchone() == (True,):
            con.execute("SET enable_progress_bar = false")
        con.execute("SET autoinstall_known_extensions = false")  # never a download at run time
        con.execute(f"SET memory_limit = {sql_text(f'{memory_limit_mb}MB')}")
        con.execute(f"SET threads = {threads}")
        con.execute(f"SET temp_directory = {sql_text(spill)}")
        try:
            yield con
        except duckdb.IOException as exc:
            reason = first_line(exc)
            if ABSENT in reason:
                pattern = reason.split(ABSENT)[1].strip()
                raise ArtifactError(
                    f"there is no file {pattern}; expected the Parquet files of a table there. "
                    "Nothing was read; take it from a backup with `falaj restore`, or run the "
                    "refresh of its windows again"
                ) from exc
            raise StorageError(
                f"{spill_parent}: DuckDB could not read or write a file ({reason}); expected a "
                "writable folder with free space. Nothing half written is visible; run again"
            ) from exc


def first_line(exc: Exception) -> str:
    """What DuckDB says, without the text of the query that follows."""
    return str(exc).split("\n", 1)[0]


def set_window(con: duckdb.DuckDBPyConnection, window: TimeWindow) -> None:
    """Let queries read the window as `getvariable('window_start')` and `window_end`."""
    con.execute("SET VARIABLE window_start = ?::TIMESTAMPTZ", [window.start])
    con.execute("SET VARIABLE window_end = ?::TIMESTAMPTZ", [window.end])


def sql_text(value: object) -> str:
    """A SQL string literal."""
    return "'" + str(value).replace("'", "''") + "'"


def sql_name(name: str) -> str:
    """A quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def names(columns: tuple[str, ...] | list[str]) -> str:
    """A comma-separated list of quoted identifiers."""
    return ", ".join(sql_name(c) for c in columns)


def sql_moment(moment: datetime) -> str:
    """A SQL literal of a moment."""
    return f"{sql_text(moment.astimezone(UTC).isoformat())}::TIMESTAMPTZ"


def inside(column: str, window: TimeWindow) -> str:
    """SQL condition that a time lies in a window."""
    name = sql_name(column)
    return f"({name} >= {sql_moment(window.start)} AND {name} < {sql_moment(window.end)})"


def parquet(path: Path) -> str:
    """A table function that reads a Parquet file, or all those of a folder.

    Reads nothing from file names: hive-style folders add no columns.
    """
    pattern = path / "*.parquet" if path.is_dir() else path
    return f"read_parquet({sql_text(pattern)}, hive_partitioning = false)"


def endless_numbers(
    con: duckdb.DuckDBPyConnection, table: str, unbounded: Collection[str] = ()
) -> str:
    """In words, the columns with numbers that are infinite or beyond `LARGEST_NUMBER`; else "".

    Args:
        con: where the table is.
        table: its name.
        unbounded: columns that may hold such numbers.
    """
    described = con.execute(f"DESCRIBE {sql_name(table)}").fetchall()
    floats = [c for c, kind, *_ in described if kind in ("FLOAT", "DOUBLE") and c not in unbounded]
    if not floats:
        return ""
    counts = ", ".join(  # NaN counts as greater than any number
        f"count(*) FILTER (abs({n}) > {LARGEST_NUMBER} AND NOT isnan({n}))"
        for n in map(sql_name, floats)
    )
    total, *numbers = con.execute(f"SELECT count(*), {counts} FROM {sql_name(table)}").fetchall()[0]
    return "; ".join(
        f"{column} is infinite, or beyond {LARGEST_NUMBER:.1e}, in {number:,} of {total:,} rows"
        for column, number in zip(floats, numbers, strict=True)
        if number
    )
