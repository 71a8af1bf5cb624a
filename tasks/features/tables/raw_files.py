"""Raw files as somebody wrote them: packed or not, with their own names and texts for nothing.

What a feature repository says about a table as it comes from outside.
"""

from __future__ import annotations

import csv
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, Self
from zoneinfo import available_timezones

import duckdb
import pyarrow.parquet as pq
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from tasks.contracts.base import field_title
from tasks.features.offline.duck import sql_name, sql_text
from tasks.kernel.errors import DataContractError

ColumnType = Literal["BIGINT", "INTEGER", "DOUBLE", "FLOAT", "VARCHAR", "BOOLEAN", "TIMESTAMPTZ"]
Identifier = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=60)]


class FrozenConfig(BaseModel):
    """Base of the configurations of this room."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)


def _is_column(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,59}", name):
        own = re.sub(r"[^a-z0-9]+", "_", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())
        raise ValueError(
            f"{name!r} is no column name here: expected lower-case letters, digits and _, a letter "
            f"first. Call it {own.strip('_') or 'column'}, and say so with rename: "
            f"{{{name}: {own.strip('_') or 'column'}}}"
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
    time_zone: str | None = Field(
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

    @model_validator(mode="after")
    def _zone_exists(self) -> Self:
        if self.time_zone is not None and self.time_zone not in available_timezones():
            raise ValueError(
                f"raw table {self.name}: there is no time zone {self.time_zone!r}; name one of the "
                "IANA data base, such as America/Chicago"
            )
        return self


DELIMITERS = ",;\t|"
NO_HEADER = "column0"
"""DuckDB's name for the one column of a file that names none."""
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
    """Turn what DuckDB cannot read, in whichever line, into a sentence.

    Raises:
        DataContractError: the file is no table, or a value of it cannot be read.
    """
    try:
        yield
    except (duckdb.InvalidInputException, duckdb.DataError) as exc:
        told = re.split(r"\nPossible ", str(exc))[0].removeprefix("Invalid Input Error: ")
        lines = [line for line in told.splitlines() if not line.startswith("Original Line")]
        reason = " ".join(" ".join(lines).split())[:LONGEST_REASON]
        form, cure = _expected(str(exc))
        raise DataContractError(
            f"raw table {table.name}: the file cannot be read as a table ({reason}); expected "
            f"{form} with the columns {', '.join(table.columns)}: {cure}. Nothing was landed"
        ) from exc


def _expected(told: str) -> tuple[str, str]:
    """What DuckDB could not find, by its words, and what to do about it."""
    if "arquet" in told:
        return "a whole Parquet file", "write it again"
    lines = "lines of equal form"
    if "not utf-8 encoded" in told:
        return lines, "save it as UTF-8"
    if "sniffing" in told:
        return lines, "give each line as many values as the first, or save the file as UTF-8"
    return lines, "mend this line, or the whole file"


def as_declared(con: duckdb.DuckDBPyConnection, table: RawTable, path: Path) -> str:
    """A relation with the declared columns under their declared names, before any typing.

    Values are text from CSV and have their own types from Parquet.

    Raises:
        DataContractError: a column is missing or stands twice in the file.
    """
    relation = _as_written(table, path)
    present = [row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {relation}").fetchall()]
    written = {name: name for name in table.columns}
    written.update({name: own for own, name in table.rename.items()})
    if missing := [own for own in written.values() if own not in present]:
        _see_broken_lines(con, table, path, present)
        raise DataContractError(
            f"raw table {table.name}: column(s) {', '.join(missing)} are missing; the file has "
            f"{', '.join(present)}. {_cure(missing, present)}. Nothing was landed"
        )
    if twice := _repeated(con, table, path, present) & {own.casefold() for own in written.values()}:
        raise DataContractError(
            f"raw table {table.name}: column name(s) {', '.join(sorted(twice))} stand more than "
            "once in the file (upper and lower case are one); give each column a name of its own "
            "there. Nothing was landed"
        )
    selected = ", ".join(f"{sql_name(own)} AS {sql_name(n)}" for n, own in written.items())
    return f"(SELECT {selected} FROM {relation})"


def _as_written(table: RawTable, path: Path, more: str = "") -> str:
    if path.suffix.lower() == ".parquet":
        return f"read_parquet({sql_text(path)})"
    nothing = [table.null_text] if isinstance(table.null_text, str) else table.null_text
    return (
        f"read_csv({sql_text(path)}, header = true, all_varchar = true, "
        f"nullstr = [{', '.join(map(sql_text, nothing))}]{more})"
    )


def _see_broken_lines(
    con: duckdb.DuckDBPyConnection, table: RawTable, path: Path, present: Sequence[str]
) -> None:
    """Fail with the number of the line for which DuckDB took a file for one of a single column."""
    if len(present) > 1 or path.suffix.lower() == ".parquet":
        return
    if present == [NO_HEADER] or not path.stat().st_size:
        raise DataContractError(
            f"raw table {table.name}: the file has no line with the names of its columns, expected "
            f"{', '.join(table.columns)}; send it with them. Nothing was landed"
        )
    counts = {mark: present[0].count(mark) for mark in DELIMITERS}
    likely = max(counts, key=counts.__getitem__)
    if counts[likely]:
        names = next(csv.reader(present, delimiter=likely))
        columns = ", ".join(f"'c{n}': 'VARCHAR'" for n, _ in enumerate(names))
        strict = f", delim = {sql_text(likely)}, auto_detect = false, columns = {{{columns}}}"
        con.execute(f"SELECT count(*) FROM {_as_written(table, path, strict)}").fetchall()


def _repeated(
    con: duckdb.DuckDBPyConnection, table: RawTable, path: Path, present: Sequence[str]
) -> set[str]:
    """Names, in lower case, that several columns of a file have; DuckDB gives them numbers."""
    if not any(re.search(r"_\d+$", name) for name in present):
        return set()
    if path.suffix.lower() == ".parquet":
        names = pq.read_schema(path).names
    else:
        first = f"read_csv({sql_text(path)}, header = false, all_varchar = true)"
        names = list(con.execute(f"SELECT * FROM {first} LIMIT 1").fetchall()[0])
    plain = [str(name).casefold() for name in names]
    return {name for name in plain if plain.count(name) > 1}


def _cure(missing: Sequence[str], present: Sequence[str]) -> str:
    """What to do about missing columns: a file's own spelling of one is found, where it has one."""
    alike = {_letters(own): own for own in present}
    found = {name: alike[_letters(name)] for name in missing if _letters(name) in alike}
    if not found:
        return (
            "Send the file with all declared columns, or change the declaration in the feature "
            "repository"
        )
    renamed = ", ".join(f"{own}: {name}" for name, own in found.items())
    return f"Declare what they are called there: rename: {{{renamed}}}"


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())
