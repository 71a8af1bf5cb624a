"""Raw files as somebody wrote them: packed or not, with their own names and texts for nothing.

What a feature repository says about a table as it comes from outside.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, Literal, Self

import duckdb
import pyarrow.parquet as pq
from pyarrow import ArrowInvalid
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from tasks.contracts.base import field_title
from tasks.contracts.clock import TimeZone
from tasks.features.offline.duck import sql_name, sql_text
from tasks.kernel.errors import DataContractError

ColumnType = Literal["BIGINT", "INTEGER", "DOUBLE", "FLOAT", "VARCHAR", "BOOLEAN", "TIMESTAMPTZ"]
Identifier = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=60)]


class FrozenConfig(BaseModel):
    """Base of the configurations of this room."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)


def _is_column(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,59}", name):
        words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()
        own = re.sub(r"[^a-z0-9]+", "_", words).strip("_") or "column"
        raise ValueError(
            f"{name!r} is no column name here: expected lower-case letters, digits and _, a letter "
            f"first. Call it {own}, and say so with rename: {{{name}: {own}}}"
        )
    return name


# A file's own column names are free; inside, one form passes through SQL, Feast and suites.
ColumnName = Annotated[
    str,
    AfterValidator(_is_column),
    WithJsonSchema({"type": "string", "pattern": r"^[a-z][a-z0-9_]*$", "maxLength": 60}),
]


class RawTable(FrozenConfig):
    """One table as it comes from outside."""

    name: Identifier = Field(description="Table that the queries read.")
    uri: str = Field(
        min_length=1,
        description="`package://<package>/<file>`, or the path of a CSV, zipped CSV or Parquet "
        "file, relative to the feature repository.",
    )
    columns: dict[ColumnName, ColumnType] = Field(min_length=1, description="Name to type.")
    rename: dict[str, ColumnName] = Field(
        default={},
        description="Name that the file gives a column to the name in `columns`, such as "
        "`{userId: user_id, Order Date: order_date}`; the others are called alike.",
    )
    key: tuple[ColumnName, ...] = Field(min_length=1, description="Columns that name one row.")
    time_column: ColumnName | None = Field(
        default=None,
        description="Column that places a row in a window; none for a table without history.",
    )
    time_zone: TimeZone | None = Field(
        default=None,
        description="Zone of times that the file writes without one, such as America/Chicago; "
        "none: such times are refused. A repeated hour counts once, as the earlier one.",
    )
    null_text: str | tuple[str, ...] = Field(
        default="NA",
        description="Text of a CSV that stands for a missing value, or several of them; an empty "
        'cell is "".',
    )
    suite: str = Field(
        default_factory=lambda given: f"raw_{given.get('name')}",
        min_length=1,
        description="Expectation suite for its rows; by default raw_<name>.",
    )

    @model_validator(mode="after")
    def _columns_are_declared(self) -> Self:
        given = list(self.rename.values())
        named = [*self.key, *([self.time_column] if self.time_column else [])]
        for what, columns in (("key or time column is", named), ("rename gives", given)):
            if unknown := sorted(set(columns) - self.columns.keys()):
                raise ValueError(
                    f"raw table {self.name}: {what} {', '.join(unknown)}, which is not among its "
                    f"columns ({', '.join(self.columns)})"
                )
        if twice := sorted({name for name in given if given.count(name) > 1}):
            raise ValueError(
                f"raw table {self.name}: rename gives {', '.join(twice)} to several columns"
            )
        if self.time_column and self.columns[self.time_column] != "TIMESTAMPTZ":
            raise ValueError(
                f"raw table {self.name}: time column {self.time_column} must be TIMESTAMPTZ, a "
                "moment with its time zone"
            )
        return self


DELIMITERS = ",;\t|"
LONGEST_REASON = 300


def unpacked(source: Path, folder: Path, table: RawTable) -> Path:
    """A zip's only member, or what is gzipped, under `folder`; any other file as it is.

    Raises:
        DataContractError: the file is damaged or locked, or a zip holds another number of files.
    """
    packing = source.suffix.lower()
    if packing not in (".zip", ".gz"):
        return source
    try:
        if packing == ".gz":
            with gzip.open(source) as packed:
                return _written(packed, folder, Path(source.stem).suffix)
        with zipfile.ZipFile(source) as archive:
            members = [m for m in archive.infolist() if not m.is_dir()]
            if len(members) != 1:
                raise DataContractError(
                    f"{source.name} holds {len(members)} files, expected one CSV; unpack it and "
                    "name the file itself. Nothing was landed"
                )
            with archive.open(members[0]) as packed:
                return _written(packed, folder, Path(members[0].filename).suffix)
    except (
        zipfile.BadZipFile,
        gzip.BadGzipFile,
        zlib.error,
        EOFError,
        RuntimeError,
        NotImplementedError,
    ) as exc:
        raise DataContractError(
            f"raw table {table.name}: {source.name} cannot be unpacked ({exc}); expected a whole "
            "zip of one CSV, without a password, or a whole .gz. Nothing was landed"
        ) from exc


def _written(packed: IO[bytes] | gzip.GzipFile, folder: Path, suffix: str) -> Path:
    # Some writers name a CSV inside after the archive around it.
    target = folder / f"unpacked{'.csv' if suffix == '.zip' else suffix}"
    with target.open("wb") as stream:
        shutil.copyfileobj(packed, stream, 1 << 20)
    return target


@contextmanager
def reading_explained(table: RawTable) -> Iterator[None]:
    """Say which file it is that DuckDB cannot read, and in which line.

    Raises:
        DataContractError: the file is no table, or a value of it cannot be read.
    """
    try:
        yield
    except (duckdb.InvalidInputException, duckdb.DataError, csv.Error, ArrowInvalid) as exc:
        lines = re.split(r"\nPossible ", str(exc))[0].splitlines()
        reason = " ".join(line for line in lines if not line.startswith("Original Line"))
        raise DataContractError(
            f"raw table {table.name}: the file cannot be read as a table "
            f"({reason[:LONGEST_REASON]}); expected a whole Parquet file, or a CSV in UTF-8 whose "
            f"lines have as many values as the first, with the columns {', '.join(table.columns)}. "
            "Nothing was landed"
        ) from exc


def as_declared(con: duckdb.DuckDBPyConnection, table: RawTable, path: Path) -> str:
    """A relation with the declared columns under their declared names, before any typing.

    Values are text from CSV and have their own types from Parquet.

    Raises:
        DataContractError: a column is missing or stands twice in the file.
    """
    written = {**{name: name for name in table.columns}, **{v: k for k, v in table.rename.items()}}
    if path.suffix.lower() == ".parquet":
        present = pq.read_schema(path).names
        relation, columns = f"read_parquet({sql_text(path)})", [sql_name(c) for c in present]
    else:
        relation, present = _csv(con, table, path, set(written.values()))
        columns = [f"c{number}" for number, _ in enumerate(present)]
    if missing := [own for own in written.values() if own not in present]:
        raise DataContractError(
            f"raw table {table.name}: column(s) {', '.join(missing)} are missing; the file has "
            f"{', '.join(present)}. Send the file with all declared columns, or declare what they "
            "are called there with rename. Nothing was landed"
        )
    spelled = [name.casefold() for name in present]
    if twice := sorted({own for own in written.values() if spelled.count(own.casefold()) > 1}):
        raise DataContractError(
            f"raw table {table.name}: column name(s) {', '.join(twice)} stand more than once in "
            "the file (upper and lower case are one); give each column a name of its own there. "
            "Nothing was landed"
        )
    selected = ", ".join(
        f"{columns[present.index(own)]} AS {sql_name(name)}" for name, own in written.items()
    )
    return f"(SELECT {selected} FROM {relation})"


def _csv(
    con: duckdb.DuckDBPyConnection, table: RawTable, path: Path, wanted: set[str]
) -> tuple[str, list[str]]:
    """A CSV with all values as text in columns c0, c1 ..., and the names in its header.

    Its form is what DuckDB finds, if the wanted columns are there in it. Otherwise the first line
    says it, by which DuckDB then names the line that has another.
    """
    form = _sniffed(con, path, wanted)
    # What is no UTF-8 DuckDB tells with its line.
    with path.open(encoding="utf-8-sig", errors="replace") as stream:
        for _ in range(form.get("skip", 0)):
            stream.readline()
        header = stream.readline()
        delimiter = form.setdefault("delim", max(DELIMITERS, key=header.count))
        lines = itertools.chain([header], stream)
        present = next(csv.reader(lines, delimiter=delimiter, skipinitialspace=True), [])
    if not present:
        raise DataContractError(
            f"raw table {table.name}: the file has no line with the names of its columns, expected "
            f"{', '.join(table.columns)}; send it with them. Nothing was landed"
        )
    nulls = [table.null_text] if isinstance(table.null_text, str) else table.null_text
    columns = ", ".join(f"'c{number}': 'VARCHAR'" for number, _ in enumerate(present))
    more = "".join(f", {name} = {sql_text(value)}" for name, value in form.items())
    return (
        f"read_csv({sql_text(path)}, header = true, auto_detect = false{more}, "
        f"nullstr = [{', '.join(map(sql_text, nulls))}], columns = {{{columns}}})"
    ), [name.strip() for name in present]


def _sniffed(con: duckdb.DuckDBPyConnection, path: Path, wanted: set[str]) -> dict[str, Any]:
    """The options with which DuckDB finds the wanted columns; none where it does not."""
    try:
        row = con.execute(
            "SELECT Delimiter, Quote, Escape, Comment, NewLineDelimiter, SkipRows, Columns FROM "
            f"sniff_csv({sql_text(path)}, header = true, all_varchar = true)"
        ).fetchall()[0]
    except duckdb.InvalidInputException as exc:
        if "unicode" in str(exc).lower():
            raise
        return {}
    if not wanted <= {column["name"] for column in row[-1]}:
        return {}
    found = dict(zip(("delim", "quote", "escape", "comment", "new_line"), row, strict=False))
    return {n: v for n, v in found.items() if v != "(empty)"} | {"skip": row[5]}
