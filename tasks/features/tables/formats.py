"""Files as somebody wrote them: Parquet, CSV or JSON, one or many, packed or not.

All files of a table are read as one relation whose columns bear the declared names.
"""

import csv
import gzip
import itertools
import re
import shutil
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Literal

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.contracts.base import TimeWindow
from tasks.features.offline.duck import sql_name, sql_text
from tasks.features.tables.raw_files import RawTable
from tasks.kernel.errors import DataContractError

Format = Literal["Parquet", "CSV", "JSON"]
ENDINGS: dict[str, Format] = {
    **dict.fromkeys((".parquet", ".pq"), "Parquet"),
    **dict.fromkeys((".csv", ".tsv", ".txt"), "CSV"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "JSON"),
}
PACKINGS = (".zip", ".gz")
DELIMITERS = ",;\t|"
ZONE_AFTER_CLOCK = r":[0-9.]+ ?(Z|[+-]\d{2}(:?\d{2})?)$"
LONGEST_REASON = 300
FILE_COLUMN = "falaj_file"


@dataclass(frozen=True)
class Form:
    """How files are read that were written alike."""

    function: str
    options: str
    columns: tuple[tuple[str, str], ...]
    """Name that a file gives a column, and its SQL name in the relation; in the files' order."""

    delimiter: str | None = None
    """Of a CSV."""
    file_column: bool = False
    """Whether a column `FILE_COLUMN` has the path of each row's file."""

    def relation(self, files: Sequence[Path]) -> str:
        """A call of the table function."""
        more = f", filename = '{FILE_COLUMN}'" if self.file_column else ""
        return f"{self.function}([{', '.join(map(sql_text, files))}]{self.options}{more})"


def ending_of(name: str) -> str:
    """Ending of a file's name, without that of its packing."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in PACKINGS else path.suffix


def format_of(name: str) -> Format:
    """Format that the name of a file promises; CSV where it says nothing."""
    return ENDINGS.get(ending_of(name), "CSV")


def unpacked(source: Path, folder: Path) -> Path:
    """A zip's only member, or what is gzipped, under `folder`; any other file as it is.

    Args:
        source: the file.
        folder: made where something is unpacked.

    Raises:
        DataContractError: the file is damaged or locked, or a zip holds another number of files.
    """
    packing = source.suffix.lower()
    if packing not in PACKINGS:
        return source
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if packing == ".gz":
            with gzip.open(source) as packed:
                return _written(packed, folder, Path(source.stem).suffix)
        with zipfile.ZipFile(source) as archive:
            members = [m for m in archive.infolist() if not m.is_dir()]
            if len(members) != 1:
                raise DataContractError(
                    f"{source.name} holds {len(members)} files, expected one CSV; unpack it and "
                    "name the file itself"
                )
            with archive.open(members[0]) as packed:
                return _written(packed, folder, Path(members[0].filename).suffix)
    except (zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, RuntimeError) as exc:
        raise DataContractError(
            f"{source.name} cannot be unpacked ({exc}); expected a whole zip of one CSV, "
            "without a password, or a whole .gz"
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
        DataContractError: a file is no table, or a value of it cannot be read.
    """
    try:
        yield
    except (duckdb.InvalidInputException, duckdb.DataError, csv.Error, pa.ArrowInvalid) as exc:
        lines = re.split(r"\nPossible |\n\nLINE ", str(exc))[0].splitlines()
        reason = " ".join(line for line in lines if not line.startswith("Original Line"))
        file = re.search(r"^  file = (.*)$", str(exc), re.MULTILINE)
        name = f" {Path(file[1]).name}" if file else ""
        raise DataContractError(
            f"the file{name} cannot be read as a table ({reason[:LONGEST_REASON]}); expected a "
            "whole Parquet file, JSON records, or a CSV in UTF-8 whose lines have as many values "
            f"as the first, which has the names {', '.join(table.columns)}".removesuffix(" ")
        ) from exc


def as_declared(
    con: duckdb.DuckDBPyConnection,
    table: RawTable,
    files: Sequence[Path],
    window: TimeWindow | None = None,
) -> str:
    """A relation with the declared columns under their declared names, before any typing.

    Values are text from CSV and JSON and have their own types from Parquet. A column that no file
    holds may be the name of a folder, as `country` is in `country=om/`.

    Args:
        con: where it is read.
        table: what is declared.
        files: at least one, all of one format.
        window: rows of Parquet that surely lie outside of it are left out.

    Raises:
        DataContractError: a column is missing or stands twice in a file, or the files differ.
    """
    own, bound = own_names(table), ""
    kind = _one_format(files)
    found: dict[Form, list[Path]] = {}
    if kind == "Parquet":
        found, bound = _parquet(table, files, own, window)
    else:
        null_text = table.null_text
        nulls = (null_text,) if isinstance(null_text, str) else null_text
        for file in files:
            is_csv = kind == "CSV"
            wanted = own.values()
            form = csv_form(con, file, wanted, nulls) if is_csv else json_form(con, file, nulls)
            found.setdefault(form, []).append(file)
    _check_columns(table, found, own)
    return f"({' UNION ALL '.join(_selected(form, m, own, bound) for form, m in found.items())})"


def own_names(table: RawTable) -> dict[str, str]:
    """Declared name to the name that the files give a column."""
    return {**{name: name for name in table.columns}, **{v: k for k, v in table.rename.items()}}


def check_present(
    table: RawTable, present: Collection[str], own: Collection[str], where: str = "the file"
) -> None:
    """See that all declared columns are there.

    Raises:
        DataContractError: one is missing.
    """
    if missing := [name for name in own if name not in present]:
        raise DataContractError(
            f"column(s) {', '.join(missing)} are missing; {where} has {', '.join(present)}. Send "
            "it with all declared columns, or declare what they are called there with rename"
        )


def folder_values(file: Path) -> dict[str, str]:
    """What the names of folders say, as `country=om` does: column to value."""
    return dict(part.split("=", 1) for part in file.parts[:-1] if "=" in part)


def near(window: TimeWindow, kind: pa.DataType | None) -> TimeWindow | None:
    """Window that holds all of `window`, as times of an Arrow type tell it; None where they cannot.

    Times without a zone are local somewhere: at most a day from UTC.
    """
    if kind is None or not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        return None
    if getattr(kind, "tz", None):
        return window
    return TimeWindow(start=window.start - timedelta(days=1), end=window.end + timedelta(days=1))


def ends_in_sql(window: TimeWindow) -> tuple[str, str]:
    """Both ends of a window as texts, which take the type of the column beside them."""
    start, end = (f"'{each:%Y-%m-%d %H:%M:%S.%f}+00'" for each in (window.start, window.end))
    return start, end


def plain_type(schema: pa.Schema, name: str) -> pa.DataType | None:
    """Type of a column, whatever its encoding and resolution; None where there is none."""
    position = schema.get_field_index(name)
    if position < 0:
        return None
    kind = schema.field(position).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz and "UTC")
    return pa.string() if kind in (pa.large_string(), pa.string_view()) else kind


def csv_form(
    con: duckdb.DuckDBPyConnection, path: Path, wanted: Collection[str], nulls: Sequence[str]
) -> Form:
    """Form of a CSV with all values as text in columns c0, c1 ...

    It is what DuckDB finds, if the wanted columns are there in it. Otherwise the first line says
    it, by which DuckDB then names the line that has another.
    """
    form = _sniffed(con, path, set(wanted))
    # What is no UTF-8 DuckDB tells with its line.
    with path.open(encoding="utf-8-sig", errors="replace") as stream:
        for _ in range(form.get("skip", 0)):
            stream.readline()
        header = stream.readline()
        delimiter = form.setdefault("delim", max(DELIMITERS, key=header.count))
        lines = itertools.chain([header], stream)
        present = next(csv.reader(lines, delimiter=delimiter, skipinitialspace=True), [])
    columns = ", ".join(f"'c{number}': 'VARCHAR'" for number, _ in enumerate(present))
    more = "".join(f", {name} = {sql_text(value)}" for name, value in form.items())
    return Form(
        "read_csv",
        f", header = true, auto_detect = false{more}, hive_partitioning = false, "
        f"nullstr = [{', '.join(map(sql_text, nulls))}], columns = {{{columns}}}",
        tuple((name.strip(), f"c{number}") for number, name in enumerate(present)),
        delimiter,
    )


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
    if not wanted <= {column["name"] for column in row[-1]} | folder_values(path).keys():
        return {}
    found = dict(zip(("delim", "quote", "escape", "comment", "new_line"), row, strict=False))
    return {n: v for n, v in found.items() if v != "(empty)"} | {"skip": row[5]}


def json_form(con: duckdb.DuckDBPyConnection, path: Path, nulls: Sequence[str] = ()) -> Form:
    """Form of JSON records, one a line or in an array, with all values as text."""
    missing = ", ".join(map(sql_text, nulls))
    described = con.execute(
        f"DESCRIBE SELECT * FROM read_json({sql_text(path)}, sample_size = -1, maximum_depth = 1, "
        "hive_partitioning = false)"
    ).fetchall()
    names = sorted(row[0] for row in described)
    columns = ", ".join(f"{sql_text(name)}: 'VARCHAR'" for name in names)
    return Form(
        "read_json",
        f", hive_partitioning = false, columns = {{{columns}}}",
        tuple(
            (name, f"CASE WHEN {sql_name(name)} NOT IN ({missing}) THEN {sql_name(name)} END")
            if missing
            else (name, sql_name(name))
            for name in names
        ),
    )


def parquet_form(schema: pa.Schema) -> Form:
    """Form of Parquet files, with the types that they have."""
    columns = tuple((name, sql_name(name)) for name in schema.names)
    return Form("read_parquet", ", hive_partitioning = false", columns)


def _parquet(
    table: RawTable, files: Sequence[Path], own: Mapping[str, str], window: TimeWindow | None
) -> tuple[dict[Form, list[Path]], str]:
    """Forms of the files, and a condition that leaves out what is surely outside the window."""
    schemas = {file: pq.read_schema(file) for file in files}
    # DuckDB takes the first file's types: one without a value has none to give.
    ordered = sorted(files, key=lambda file: sum(map(pa.types.is_null, schemas[file].types)))
    first, found = schemas[ordered[0]], dict[Form, list[Path]]()
    for file in ordered:
        for written in own.values():
            there, here = plain_type(first, written), plain_type(schemas[file], written)
            if there and here and there != here and not pa.types.is_null(here):
                raise DataContractError(
                    f"column {written} is {there} in {ordered[0].name} and {here} in {file.name}; "
                    "expected one type in all files. Write one of them again with the type of the "
                    "other"
                )
        found.setdefault(parquet_form(schemas[file]), []).append(file)
    time = own.get(table.time_column or "", "")
    bounds = near(window, plain_type(first, time)) if window else None
    if bounds is None:
        return found, ""
    (since, until), name = ends_in_sql(bounds), sql_name(time)
    return found, f" WHERE {name} >= {since} AND {name} < {until} OR {name} IS NULL"


def _one_format(files: Sequence[Path]) -> Format:
    kinds = {format_of(file.name): file.name for file in files}
    if len(kinds) > 1:
        told = " and ".join(f"{name} is {kind}" for kind, name in sorted(kinds.items()))
        raise DataContractError(
            f"{told}; expected files of one format. Name those of one with a pattern, such as "
            "data/*.parquet"
        )
    return next(iter(kinds))


def _check_columns(
    table: RawTable, found: Mapping[Form, Sequence[Path]], own: Mapping[str, str]
) -> None:
    several = sum(map(len, found.values())) > 1
    whole = ""
    for form, files in found.items():
        present = [name for name, _ in form.columns]
        if not present:
            raise DataContractError(
                f"{files[0].name if several else 'the file'} has no line with the names of its "
                f"columns, expected {', '.join(table.columns)}; send it with them"
            )
        spelled = [name.casefold() for name in present]
        if twice := sorted({n for n in own.values() if spelled.count(n.casefold()) > 1}):
            raise DataContractError(
                f"column name(s) {', '.join(twice)} stand more than once in the file (upper and "
                "lower case are one); give each column a name of its own there"
            )
        for file in files:
            where = f"{whole and f'{whole} has them, but '}{file.name}" if several else "the file"
            check_present(table, [*present, *folder_values(file)], own.values(), where)
            whole = file.name


def _selected(form: Form, files: Sequence[Path], own: Mapping[str, str], bound: str) -> str:
    columns = dict(form.columns)
    terms = []
    for name, written in own.items():
        value = columns.get(written)
        if value is None:
            folder = sql_text(f"(?:^|/){re.escape(written)}=([^/]*)/")
            said = f"url_decode(regexp_extract({FILE_COLUMN}, {folder}, 1))"
            value = f"nullif({said}, {sql_text('__HIVE_DEFAULT_PARTITION__')})"
            form = replace(form, file_column=True)
        terms.append(f"{value} AS {sql_name(name)}")
    return f"SELECT {', '.join(terms)} FROM {form.relation(files)}{bound}"
