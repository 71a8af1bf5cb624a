"""What is in files that nobody has described yet: a proposal for `raw_tables` of use_case.yaml."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import duckdb
import pyarrow.parquet as pq

from tasks.contracts.base import TimeWindow
from tasks.features.offline.duck import duckdb_session, sql_text
from tasks.features.tables import formats
from tasks.features.tables.copies import about
from tasks.features.tables.raw_files import ColumnType, RawTable, column_name, undeclared
from tasks.features.tables.sources import open_source
from tasks.kernel.errors import DataContractError
from tasks.kernel.files import scratch_folder

EVER = TimeWindow(start=datetime(1950, 1, 1, tzinfo=UTC), end=datetime(2200, 1, 1, tzinfo=UTC))
NULL_TEXTS = (
    *("NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null", "Null", "None", "none"),
    *("-", "--", "?", ".", "\\N", "missing", "unknown"),
)
"""Texts that stand for a missing value where all others of the column are numbers or times."""
LARGEST_SAMPLE = 1_000_000
NOTHING = "\x00"
"""A text that no CSV has, so that its empty cells stay texts."""
FITS: dict[ColumnType, str] = {
    "BOOLEAN": "{0} SIMILAR TO '(?i:true|false|yes|no|t|f|y|n)' "
    "AND TRY_CAST({0} AS BOOLEAN) IS NOT NULL",
    # 007 names something: as a number it would lose its zeros.
    "BIGINT": "{0} SIMILAR TO '[+-]?(0|[1-9][0-9]*)' AND TRY_CAST({0} AS BIGINT) IS NOT NULL",
    "DOUBLE": "NOT {0} SIMILAR TO '[+-]?0[0-9].*' AND TRY_CAST({0} AS DOUBLE) IS NOT NULL",
    "TIMESTAMPTZ": "{0} SIMILAR TO '[0-9]+-.*' AND TRY_CAST({0} AS TIMESTAMP) IS NOT NULL",
}
"""Types in the order in which a text is tried."""
STORED: dict[str, ColumnType] = {
    "TIMESTAMP": "TIMESTAMPTZ",
    "DATE": "TIMESTAMPTZ",
    "INT": "BIGINT",
    "DOUBLE": "DOUBLE",
    "FLOAT": "DOUBLE",
    "DECIMAL": "DOUBLE",
    "BOOLEAN": "BOOLEAN",
}
"""Words of the types in which Parquet has its columns; others are looked at as texts."""


@dataclass(frozen=True)
class SniffedColumn:
    """One column as it is written, and what to declare for it."""

    name: str
    """Proposed; no other column of the table has it."""
    written: str
    """Name that the file gives it."""
    type: ColumnType
    null_texts: tuple[str, ...]
    """Texts in it that stand for a missing value; an empty cell is ""."""
    num_missing: int
    num_distinct: int
    """Different values, without missing ones."""
    examples: tuple[str, ...]
    has_zone: bool
    """Whether its times say their zone; true of all but times."""

    @property
    def is_number(self) -> bool:
        """Whether a model takes it as a number."""
        return self.type in ("BIGINT", "DOUBLE")


@dataclass(frozen=True)
class SniffedTable:
    """What files hold, as far as they themselves tell."""

    format: formats.Format
    delimiter: str | None
    """Of a CSV."""
    num_files: int
    num_rows: int
    """That were looked at."""
    is_sample: bool
    """Whether there are more rows than those."""
    columns: tuple[SniffedColumn, ...]

    @property
    def rename(self) -> dict[str, str]:
        """As `raw_tables[].rename` wants it: only columns whose names change."""
        return {c.written: c.name for c in self.columns if c.written != c.name}

    @property
    def null_text(self) -> tuple[str, ...]:
        """As `raw_tables[].null_text` wants it; empty cells are missing values."""
        return tuple(dict.fromkeys(["", *(text for c in self.columns for text in c.null_texts)]))


def table_name(uri: str) -> str:
    """A name for a raw table: that of the file, folder or table of a database, without endings."""
    path = urlsplit(uri).path if "://" in uri else uri
    parts = [re.split(r"[*?@]", part)[0] for part in path.split("/")]
    last = next(filter(None, reversed(parts)), "events")
    is_file = formats.ending_of(last) in formats.ENDINGS
    return column_name(last.partition(".")[0] if is_file else last.rpartition(".")[2])


def sniff(uri: str | Path) -> SniffedTable:
    """Look at files or rows somewhere, such as a raw table's `uri` names; all are copied here.

    The first file tells the columns; the others are read with it, as far as a million rows.

    Args:
        uri: a path here, or an address.

    Raises:
        ConfigurationError: it names nothing, or nothing that may be read.
        TransientError: the source does not answer.
        DataContractError: a file is damaged, empty or no table, or lacks a column of the first.
    """
    table = undeclared(table_name(str(uri)), str(uri))
    with scratch_folder("falaj-sniff") as scratch, duckdb_session(scratch) as con, about(table):
        files = list(open_source(table, Path.cwd(), EVER, scratch / "source").bring())
        with formats.reading_explained(table):
            return _sniffed(con, table, files)


def _sniffed(
    con: duckdb.DuckDBPyConnection, table: RawTable, files: Sequence[Path]
) -> SniffedTable:
    kind = formats.format_of(files[0].name)
    form = FORMS[kind](con, files[0])
    if not form.columns:
        raise DataContractError(
            f"{files[0].name} holds no columns; expected a line with their names, and rows below it"
        )
    rename = {written: f"v{number}" for number, (written, _) in enumerate(form.columns)}
    meant = {"columns": dict.fromkeys(rename.values()), "rename": rename, "null_text": (NOTHING,)}
    relation = formats.as_declared(con, table.model_copy(update=meant), files)
    con.execute(f"CREATE TABLE seen AS FROM {relation} LIMIT {LARGEST_SAMPLE + 1}")
    types = [row[1] for row in con.execute("DESCRIBE seen").fetchall()]
    num_rows = con.execute("SELECT count(*) FROM seen").fetchall()[0][0]
    names: list[str] = []
    columns = []
    for number, (written, _) in enumerate(form.columns):
        proposed = column_name(written)
        others = (f"{proposed[:56]}_{n}" for n in itertools.count(2))
        names.append(next(n for n in itertools.chain([proposed], others) if n not in names))
        columns.append(_column(con, f"v{number}", names[-1], written, types[number]))
    is_sample = num_rows > LARGEST_SAMPLE
    return SniffedTable(kind, form.delimiter, len(files), num_rows, is_sample, tuple(columns))


FORMS: dict[formats.Format, Callable[[duckdb.DuckDBPyConnection, Path], formats.Form]] = {
    "Parquet": lambda con, file: formats.parquet_form(pq.read_schema(file)),
    "CSV": lambda con, file: formats.csv_form(con, file, (), (NOTHING,)),
    "JSON": formats.json_form,
}
TEXTS = ", ".join(map(sql_text, ("", *NULL_TEXTS)))


def _column(
    con: duckdb.DuckDBPyConnection, value: str, name: str, written: str, stored: str
) -> SniffedColumn:
    is_nested = stored.startswith(("STRUCT", "MAP", "INTERVAL")) or stored.endswith("]")
    known = None if is_nested else next((k for word, k in STORED.items() if word in stored), None)
    text = f"{value}::VARCHAR"
    nothing: list[str] = []
    if known:
        has_zone = known != "TIMESTAMPTZ" or "ZONE" in stored or "TZ" in stored
        kind: ColumnType = known
    else:
        meant = f"{text} NOT IN ({TEXTS})"
        zoned = f"regexp_matches({text}, {sql_text(formats.ZONE_AFTER_CLOCK)})"
        counts = [f"count(*) FILTER ({meant} AND {fit.format(text)})" for fit in FITS.values()]
        num_meant, num_zoned, *fitting = con.execute(
            f"SELECT count(*) FILTER ({meant}), count(*) FILTER ({meant} AND {zoned}), "
            f"{', '.join(counts)} FROM seen"
        ).fetchall()[0]
        fitted = (k for k, n in zip(FITS, fitting, strict=True) if n == num_meant > 0)
        kind = next(fitted, "VARCHAR")
        has_zone = kind != "TIMESTAMPTZ" or num_zoned == num_meant
        # In a text NA may be Namibia, and `unknown` an answer; where nothing else is, it is none.
        asked = TEXTS if kind != "VARCHAR" or not num_meant else "''"
        query = f"SELECT DISTINCT {text} FROM seen WHERE {text} IN ({asked}) ORDER BY 1"
        nothing = [row[0] for row in con.execute(query).fetchall()]
    missing = ", ".join(map(sql_text, [NOTHING, *nothing]))
    present = f"FROM seen WHERE {text} NOT IN ({missing})"
    num_missing, num_distinct = con.execute(
        f"SELECT (SELECT count(*) FROM seen) - count(*), count(DISTINCT {value}) {present}"
    ).fetchall()[0]
    examples = con.execute(
        f"SELECT {text}, min(rowid) {present} AND rowid < 1000 GROUP BY 1 ORDER BY 2 LIMIT 3"
    ).fetchall()
    shown = tuple(row[0] for row in examples)
    return SniffedColumn(
        name, written, kind, tuple(nothing), num_missing, num_distinct, shown, has_zone
    )
