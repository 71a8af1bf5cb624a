"""What is in files that nobody has described yet: a proposal for `raw_tables` of use_case.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import LocalFileSystem

from tasks.features.offline.duck import duckdb_session, sql_name, sql_text
from tasks.features.tables.files import named_files
from tasks.features.tables.formats import (
    ZONE_AFTER_CLOCK,
    Format,
    csv_form,
    format_of,
    json_form,
    unpacked,
)
from tasks.features.tables.raw_files import ColumnType, column_name
from tasks.kernel.errors import DataContractError
from tasks.kernel.files import scratch_folder

NULL_TEXTS = (
    *("NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null", "Null", "None", "none"),
    *("-", "--", "?", ".", "\\N", "missing", "unknown"),
)
"""Texts that stand for a missing value where all others of the column are numbers or times."""
LARGEST_SAMPLE = 1_000_000
NUM_EXAMPLES = 3


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


@dataclass(frozen=True)
class SniffedTable:
    """What files hold, as far as they themselves tell."""

    format: Format
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


def sniff(path: Path | str) -> SniffedTable:
    """Look at a file, a folder, or the files that fit a pattern.

    The first file tells the columns; landing refuses others that differ.

    Args:
        path: local.

    Raises:
        ConfigurationError: it names no file.
        DataContractError: the first file is damaged, empty or no table.
    """
    files = [Path(info.path) for info in named_files(LocalFileSystem(), str(path))]
    with scratch_folder("falaj-sniff") as scratch, duckdb_session(scratch) as con:
        first = unpacked(files[0], scratch / "unpacked")
        try:
            return _sniffed(con, first, len(files))
        except (duckdb.Error, pa.ArrowInvalid, UnicodeDecodeError) as exc:
            reason = str(exc).split("\nPossible ")[0].replace("\n", " ")[:300]
            raise DataContractError(
                f"{files[0]} cannot be read as a table ({reason}); expected a whole Parquet file, "
                "JSON records, or a CSV in UTF-8 with a line of names first. Nothing was written"
            ) from exc


def _sniffed(con: duckdb.DuckDBPyConnection, file: Path, num_files: int) -> SniffedTable:
    kind, delimiter = format_of(file.name), None
    if kind == "Parquet":
        schema = pq.read_schema(file)
        written = list(schema.names)
        relation = f"read_parquet({sql_text(file)}, hive_partitioning = false)"
        values = [f"{sql_name(name)}::VARCHAR" for name in written]
    else:
        form = csv_form(con, file, (), (NOTHING,)) if kind == "CSV" else json_form(con, file)
        written = [name for name, _ in form.columns]
        relation, values = form.relation([file]), [column for _, column in form.columns]
        delimiter = form.delimiter
    if not written:
        raise DataContractError(
            f"{file.name} holds no columns; expected a line with their names, and rows below it"
        )
    listed = ", ".join(f"{value} AS v{number}" for number, value in enumerate(values))
    con.execute(f"CREATE TABLE seen AS SELECT {listed} FROM {relation} LIMIT {LARGEST_SAMPLE + 1}")
    num_rows = con.execute("SELECT count(*) FROM seen").fetchall()[0][0]
    names = _proposed(written)
    columns = []
    for number, name in enumerate(written):
        known = _arrow_type(schema.field(number).type) if kind == "Parquet" else None
        columns.append(_column(con, f"v{number}", names[number], name, known))
    return SniffedTable(
        kind, delimiter, num_files, num_rows, num_rows > LARGEST_SAMPLE, tuple(columns)
    )


NOTHING = "\x00"
"""A text that no CSV has, so that its empty cells stay texts."""


def _proposed(written: Sequence[str]) -> list[str]:
    names: list[str] = []
    for text in written:
        base, name, number = column_name(text), column_name(text), 1
        while name in names:
            number += 1
            name = f"{base[:56]}_{number}"
        names.append(name)
    return names


def _arrow_type(kind: pa.DataType) -> tuple[ColumnType, bool]:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "TIMESTAMPTZ", getattr(kind, "tz", None) is not None
    if pa.types.is_boolean(kind):
        return "BOOLEAN", True
    if pa.types.is_integer(kind):
        return "BIGINT", True
    is_number = pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return ("DOUBLE" if is_number else "VARCHAR"), True


def _column(
    con: duckdb.DuckDBPyConnection,
    value: str,
    name: str,
    written: str,
    known: tuple[ColumnType, bool] | None,
) -> SniffedColumn:
    texts = ", ".join(map(sql_text, ("", *NULL_TEXTS)))
    counts: dict[ColumnType, str] = {
        "BOOLEAN": f"{value} SIMILAR TO '(?i:true|false|yes|no|t|f|y|n)' "
        f"AND TRY_CAST({value} AS BOOLEAN) IS NOT NULL",
        # 007 names something: as a number it would lose its zeros.
        "BIGINT": f"{value} SIMILAR TO '[+-]?(0|[1-9][0-9]*)' "
        f"AND TRY_CAST({value} AS BIGINT) IS NOT NULL",
        "DOUBLE": f"NOT {value} SIMILAR TO '[+-]?0[0-9].*' "
        f"AND TRY_CAST({value} AS DOUBLE) IS NOT NULL",
        "TIMESTAMPTZ": f"{value} SIMILAR TO '[0-9]+-.*' "
        f"AND TRY_CAST({value} AS TIMESTAMP) IS NOT NULL",
    }
    told = f"{value} NOT IN ({texts})"
    zoned = f"regexp_matches({value}, {sql_text(ZONE_AFTER_CLOCK)})"
    total, num_told, num_zoned, *fits = con.execute(
        f"SELECT count(*), count(*) FILTER ({told}), count(*) FILTER ({told} AND {zoned}), "
        + ", ".join(f"count(*) FILTER ({told} AND {fit})" for fit in counts.values())
        + " FROM seen"
    ).fetchall()[0]
    kind: ColumnType = "VARCHAR"
    if known:
        kind, has_zone = known
        nothing: list[str] = []
    else:
        if num_told:
            kind = next((k for k, fit in zip(counts, fits, strict=True) if fit == num_told), kind)
        has_zone = kind != "TIMESTAMPTZ" or num_zoned == num_told
        # In a text NA may be Namibia, and `unknown` an answer; where nothing else is, it is none.
        asked = texts if kind != "VARCHAR" or not num_told else "''"
        nothing = [
            row[0]
            for row in con.execute(
                f"SELECT DISTINCT {value} FROM seen WHERE {value} IN ({asked}) ORDER BY 1"
            ).fetchall()
        ]
    missing = ", ".join(map(sql_text, nothing)) or sql_text(NOTHING)
    present = f"{value} IS NOT NULL AND {value} NOT IN ({missing})"
    num_present, num_distinct = con.execute(
        f"SELECT count(*), count(DISTINCT {value}) FROM seen WHERE {present}"
    ).fetchall()[0]
    examples = con.execute(
        f"SELECT {value} FROM (SELECT {value}, min(rowid) AS place FROM seen WHERE {present} "
        f"AND rowid < 1000 GROUP BY 1) ORDER BY place LIMIT {NUM_EXAMPLES}"
    ).fetchall()
    return SniffedColumn(
        name=name,
        written=written,
        type=kind,
        null_texts=tuple(nothing),
        num_missing=total - num_present,
        num_distinct=num_distinct,
        examples=tuple(row[0] for row in examples),
        has_zone=has_zone,
    )
