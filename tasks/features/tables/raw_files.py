"""Raw files as somebody wrote them: packed or not, with their own names and texts for nothing.

What a feature repository says about a table as it comes from outside.
"""

from __future__ import annotations

import csv
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, Self

import duckdb
import pyarrow.parquet as pq
from pyarrow import ArrowInvalid
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

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
        raise ValueError(
            f"{name!r} is no column name here: expected lower-case letters, digits and _, a letter "
            f"first. Choose such a name, and declare the file's own with rename: {{{name}: <name>}}"
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
    suite: str = Field(min_length=1, description="Expectation suite for its rows.")

    @model_validator(mode="after")
    def _columns_are_declared(self) -> Self:
        named = {*self.key, *([self.time_column] if self.time_column else [])}
        if unknown := sorted(named - self.columns.keys()):
            raise ValueError(
                f"raw table {self.name}: key or time column {', '.join(unknown)} is not among its "
                "columns"
            )
        if self.time_column and self.columns[self.time_column] != "TIMESTAMPTZ":
            raise ValueError(
                f"raw table {self.name}: time column {self.time_column} must be TIMESTAMPTZ, a "
                "moment with its time zone"
            )
        return self

    @model_validator(mode="after")
    def _renamed_columns_are_declared_once(self) -> Self:
        names = list(self.rename.values())
        if unknown := sorted(set(names) - self.columns.keys()):
            raise ValueError(
                f"raw table {self.name}: rename gives {', '.join(unknown)}, which is not among its "
                f"columns ({', '.join(self.columns)})"
            )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"raw table {self.name}: rename gives {', '.join(twice)} to several columns"
            )
        return self


DELIMITERS = ",;\t|"
LONGEST_REASON = 300


def unpacked(source: Path, folder: Path, table: RawTable) -> Path:
    """A zip's only member, written under `folder`; any other file as it is.

    Raises:
        DataContractError: the zip is damaged, locked, or holds another number of files.
    """
    if source.suffix.lower() != ".zip":
        return source
    try:
        with zipfile.ZipFile(source) as archive:
            members = [m for m in archive.infolist() if not m.is_dir()]
            if len(members) != 1:
                raise DataContractError(
                    f"{source.name} holds {len(members)} files, expected one CSV; unpack it and "
                    "name the file itself. Nothing was landed"
                )
            suffix = Path(members[0].filename).suffix
            # Some writers name a CSV inside after the archive around it.
            target = folder / f"unpacked{'.csv' if suffix == '.zip' else suffix}"
            with archive.open(members[0]) as packed, target.open("wb") as stream:
                while chunk := packed.read(1 << 20):
                    stream.write(chunk)
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError) as exc:
        raise DataContractError(
            f"raw table {table.name}: {source.name} cannot be unpacked ({exc}); expected a zip of "
            "one CSV, without a password. Nothing was landed"
        ) from exc
    return target


@contextmanager
def reading_explained(table: RawTable) -> Iterator[None]:
    """Say which file it is that DuckDB cannot read, and in which line.

    Raises:
        DataContractError: the file is no table, or a value of it cannot be read.
    """
    try:
        yield
    except (
        duckdb.InvalidInputException,
        duckdb.DataError,
        UnicodeDecodeError,
        ArrowInvalid,
    ) as exc:
        lines = re.split(r"\nPossible ", str(exc))[0].splitlines()
        reason = " ".join(line for line in lines if not line.startswith("Original Line"))
        raise DataContractError(
            f"raw table {table.name}: the file cannot be read as a table "
            f"({reason[:LONGEST_REASON]}); expected a whole Parquet file, or a CSV in UTF-8 whose "
            f"lines have as many values as the first, with the columns {', '.join(table.columns)}. "
            "Nothing was landed"
        ) from exc


def as_declared(table: RawTable, path: Path) -> str:
    """A relation with the declared columns under their declared names, before any typing.

    Values are text from CSV and have their own types from Parquet.

    Raises:
        DataContractError: a column is missing or stands twice in the file.
    """
    if path.suffix.lower() == ".parquet":
        present = pq.read_schema(path).names
        relation, columns = f"read_parquet({sql_text(path)})", [sql_name(c) for c in present]
    else:
        relation, present = _csv(table, path)
        columns = [f"c{number}" for number, _ in enumerate(present)]
    written = {**{name: name for name in table.columns}, **{v: k for k, v in table.rename.items()}}
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


def _csv(table: RawTable, path: Path) -> tuple[str, list[str]]:
    """A CSV with all values as text in columns c0, c1 ..., and the names in its first line."""
    with path.open("rb") as stream:
        header = stream.readline().decode("utf-8-sig").strip("\r\n")
    if not header:
        raise DataContractError(
            f"raw table {table.name}: the file has no line with the names of its columns, expected "
            f"{', '.join(table.columns)}; send it with them. Nothing was landed"
        )
    delimiter = max(DELIMITERS, key=header.count)
    present = next(csv.reader([header], delimiter=delimiter))
    nulls = [table.null_text] if isinstance(table.null_text, str) else table.null_text
    columns = ", ".join(f"'c{number}': 'VARCHAR'" for number, _ in enumerate(present))
    return (
        f"read_csv({sql_text(path)}, header = true, auto_detect = false, delim = "
        f"{sql_text(delimiter)}, nullstr = [{', '.join(map(sql_text, nulls))}], "
        f"columns = {{{columns}}})"
    ), present
