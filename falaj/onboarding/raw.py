"""Raw tables: read as a run would read them, and the line of a value that cannot be read."""

from __future__ import annotations

import ast
import csv
import gzip
import io
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

import duckdb

from falaj.onboarding.findings import Finding, Severity, YamlPlaces, finding_of, nearest
from flows.config import PipelineConfig
from tasks.contracts.data import LandedRows, TableRef
from tasks.features.offline.duck import duckdb_session, names, parquet, sql_name, sql_text
from tasks.features.tables.landing import land_raw_rows
from tasks.features.tables.raw_files import RawTable
from tasks.kernel.errors import ConfigurationError, DataContractError, WindowError
from tasks.kernel.settings import USE_CASE_FILE, ArtifactStore, StagedFolder

CHECK = "rows"
SAMPLE_ROWS = 30_000
"""So many rows of a table are looked at further: all of a key, or none, by a hash of it."""
FEW_VALUES = 1000
DATE = r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d+)?)?)?"
ADVICE = (
    (rf"{DATE}", "TIMESTAMPTZ", "add `time_zone: UTC` to the table, or the zone of its clock"),
    (
        r"\d{1,2}[./-]\d{1,2}[./-]\d{2,4}.*",
        "TIMESTAMPTZ",
        "write times as 2024-01-31 15:00, year first; which of the two is the day, nobody can know",
    ),
    (
        r"-?[\d.' ]*\d,\d+",
        "DOUBLE FLOAT BIGINT INTEGER",
        "write decimals with a point and nothing between thousands; or declare the column VARCHAR "
        "and convert it in SQL: replace(..., ',', '.')::DOUBLE",
    ),
    (r"-?\d+\.\d*", "BIGINT INTEGER", "declare the column DOUBLE"),
    (
        r"-?\d{10,}",
        "BIGINT INTEGER",
        "declare the column VARCHAR where it is a name, DOUBLE where it is a quantity",
    ),
    (
        r"(?i)yes|no|y|n|true|false|t|f|ja|nein",
        "BIGINT INTEGER DOUBLE FLOAT BOOLEAN",
        "declare the column VARCHAR, and write a condition where a number is needed, such as "
        "label: (churned = 'yes')",
    ),
    (
        r"(?i)|-+|\?|n/?a|nan|null|none|nil|unknown|\.",
        "BIGINT INTEGER DOUBLE FLOAT BOOLEAN TIMESTAMPTZ",
        'add it to `null_text` of the table, such as null_text: ["", {value}]',
    ),
)
"""A value that is not of a type, the types, and what to do."""


@dataclass(frozen=True)
class Sampled:
    """A sample of raw rows, the share that it is of each table, and what all rows showed."""

    rows: LandedRows
    shares: dict[str, float]
    findings: list[Finding]


def land(
    config: PipelineConfig, repo: Path, store: ArtifactStore, places: YamlPlaces
) -> tuple[dict[str, TableRef], list[Finding]]:
    """Land every raw table by itself, so that each mistake is seen; returns those that landed."""
    tables: dict[str, TableRef] = {}
    findings: list[Finding] = []
    for number, table in enumerate(config.features.raw_tables):
        alone = config.features.model_copy(update={"raw_tables": (table,)})
        try:
            landed = land_raw_rows(config.window, alone, repo, store)
        except ConfigurationError as exc:
            findings.append(_not_found(exc, table, repo, places, number))
        except WindowError as exc:
            line = places.first("window", "splits")
            wrong = finding_of(exc, "splits", USE_CASE_FILE, line, action="end it before now")
            return {}, [replace(wrong, kind="configuration")]
        except DataContractError as exc:
            findings += _refused(exc, table, repo, places, number)
        else:
            tables[table.name] = landed.tables[0]
    return tables, findings


def _not_found(
    exc: ConfigurationError, table: RawTable, repo: Path, places: YamlPlaces, number: int
) -> Finding:
    line = places.line("features", "raw_tables", number, "uri")
    folder = (repo / table.uri).parent
    others = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    near = nearest(Path(table.uri).name, others)
    action = f"did you mean {near}? mend the uri" if near else "put the file there or mend the uri"
    return finding_of(exc, CHECK, USE_CASE_FILE, line, action=action)


def _refused(
    exc: DataContractError, table: RawTable, repo: Path, places: YamlPlaces, number: int
) -> list[Finding]:
    """The findings of a file that was refused, each with its line where it is text."""
    text, at = str(exc), ("features", "raw_tables", number)
    declared = places.line(*at)
    if missing := re.search(r"column\(s\) (.+) are missing; the file has (.+?)\. Send", text):
        absent, present = missing[1].split(", "), missing[2].split(", ")
        if len(absent) == len(table.columns):
            return [_nameless(table, present)]
        lines = [places.line(*at, "columns", name) for name in absent]
        return [_missing(table, c, present, n) for c, n in zip(absent, lines, strict=True)]
    pattern = r"(\w+) has (\d+) value\(s\) that are no (.+?), such as (.+?)(?=; \w+ has |\. Mend)"
    if found := re.findall(pattern, text):
        return [
            _misfit(table, repo, column, int(count), kind, ast.literal_eval(f"[{shown}]"), declared)
            for column, count, kind, shown in found
        ]
    line = re.search(r"[Ll]ine:? (\d+)", text)
    action = ""
    if "cannot be read as a table" in text:
        action = "mend that line, or send the file again"
        if "nicode" in text:
            action = "save the file as UTF-8, such as `iconv -f LATIN1 -t UTF-8`"
    elif "no line with the names" in text:
        action = "send the file with its rows, and the names of its columns in the first line"
    elif "holds no rows" in text:
        action = f"send the file with its rows, or set `window` in {USE_CASE_FILE} to theirs"
    return [finding_of(exc, CHECK, table.uri, int(line[1]) if line else None, action=action)]


def _missing(table: RawTable, name: str, present: list[str], line: int) -> Finding:
    near = nearest(name, present)
    if near:
        own = {v: k for k, v in table.rename.items()}.get(name)
        change = f"mend the name {own}" if own else f"add `rename: {{{near}: {name}}}`"
        action = f"did you mean {near}? {change} in {USE_CASE_FILE}:{line}"
    else:
        action = f"send the file with it, or take it out of `columns` in {USE_CASE_FILE}:{line}"
    return Finding(
        check=CHECK,
        kind="data",
        file=table.uri,
        line=1,
        column=name,
        seen=f"raw table {table.name} has no column {name}; it has {', '.join(present)}",
        action=action,
    )


def _nameless(table: RawTable, present: list[str]) -> Finding:
    action = "write the names of its columns into the first line, or declare those that it has"
    if len(present) == 1:
        action = "separate the columns by a comma, semicolon, tab or |: it reads as one column"
    return Finding(
        check=CHECK,
        kind="data",
        file=table.uri,
        line=1,
        seen=f"the file of raw table {table.name} has no column of it, but {', '.join(present)}",
        expected=", ".join(table.columns),
        action=action,
    )


def _misfit(
    table: RawTable,
    repo: Path,
    column: str,
    count: int,
    kind: str,
    values: list[str],
    declared: int,
) -> Finding:
    value = values[0]
    types = table.columns[column]
    fits = (a for p, kinds, a in ADVICE if types in kinds.split() and re.fullmatch(p, value))
    advice = next(fits, f"mend the value, or declare another type than {types}")
    line, seen = _line_of(repo / table.uri, table, column, values)
    return Finding(
        check=CHECK,
        kind="data",
        file=table.uri,
        line=line,
        column=column,
        seen=f"{(seen or value)!r} ({count:,} such value(s))",
        expected=f"a {kind}, as {USE_CASE_FILE} declares it ({types})",
        action=f"{advice.replace('{value}', repr(value))} ({USE_CASE_FILE}:{declared})",
    )


def _line_of(
    path: Path, table: RawTable, column: str, values: list[str]
) -> tuple[int | None, str | None]:
    """First line of a text file in which a column has one of some values, and that value."""
    own = {name: given for given, name in table.rename.items()}.get(column, column)
    if path.suffix.lower() in (".parquet", ".json", ".jsonl", ".ndjson") or not path.is_file():
        return None, None
    with _text(path) as stream:
        head = stream.read(1 << 16)
        stream.seek(0)
        first = head.partition("\n")[0]
        reader = csv.reader(stream, delimiter=max(",;\t|", key=first.count))
        place = None
        for cells in reader:
            stripped = [cell.strip() for cell in cells]
            if place is None:
                place = stripped.index(own) if own in stripped else None
            elif place < len(stripped) and stripped[place] in values:
                return reader.line_num, stripped[place]
    return None, None


@contextmanager
def _text(path: Path) -> Iterator[IO[str]]:
    if path.suffix.lower() == ".zip":
        with zipfile.ZipFile(path) as archive, archive.open(archive.namelist()[0]) as packed:
            yield io.TextIOWrapper(packed, "utf-8-sig", newline="")
    elif path.suffix.lower() == ".gz":
        with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as stream:
            yield stream
    else:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            yield stream


def sample(
    landed: Mapping[str, TableRef], config: PipelineConfig, repo: Path, store: ArtifactStore
) -> Sampled:
    """A sample of every landed table, and what the rows show; all rows of a key, or none."""
    findings: list[Finding] = []
    shares: dict[str, float] = {}

    def build(folder: StagedFolder) -> LandedRows:
        refs = []
        with duckdb_session(store.root) as con:
            for table in config.features.raw_tables:
                ref = landed[table.name]
                rows = parquet(store.path(ref.artifact, verify=False))
                strict = _demands_unique_keys(repo, table)
                findings.extend(_row_findings(con, table, rows, "error" if strict else "warning"))
                parts = -(-ref.num_rows // SAMPLE_ROWS)
                shares[table.name] = 1 / parts
                if parts > 1:
                    file, key = folder.path / f"{table.name}.parquet", names(list(table.key))
                    con.execute(
                        f"COPY (SELECT * FROM {rows} WHERE hash({key}) % {parts} = 0) "
                        f"TO {sql_text(file)} (FORMAT parquet)"
                    )
                    ref = ref.model_copy(update={"artifact": folder.artifact(file.name)})
                refs.append(ref)
        return LandedRows(window=config.window, tables=tuple(refs))

    rows = store.build_once("sample", "rows", LandedRows, build)
    return Sampled(rows, shares, findings)


def _demands_unique_keys(repo: Path, table: RawTable) -> bool:
    """Whether a run refuses rows of one key; a suite that somebody wrote may leave that out."""
    suite = repo / "expectations" / f"{table.suite}.yaml"
    return not suite.is_file() or "_unique" in suite.read_text(encoding="utf-8")


def _row_findings(
    con: duckdb.DuckDBPyConnection, table: RawTable, rows: str, doubled_keys: Severity
) -> Iterator[Finding]:
    found = partial(Finding, check=CHECK, kind="data", file=table.uri)
    key = names(list(table.key))
    doubled, example = con.execute(
        f"SELECT count(*), any_value(k) FROM (SELECT row({key})::VARCHAR AS k FROM {rows} "
        f"GROUP BY {key} HAVING count(*) > 1)"
    ).fetchall()[0]
    if doubled:
        yield found(
            column="+".join(table.key),
            seen=f"{doubled:,} key(s) stand in several rows, such as {example}",
            expected="one row a key",
            action=f"remove the copies, or name more columns in `key` of raw table {table.name}",
            severity=doubled_keys,
        )
    counts = ", ".join(f"count({sql_name(column)})" for column in table.columns)
    total, *known = con.execute(f"SELECT count(*), {counts} FROM {rows}").fetchall()[0]
    for column, number in zip(table.columns, known, strict=True):
        if column in table.key and number < total:
            yield found(
                column=column,
                seen=f"{total - number:,} of {total:,} row(s) have no value in the key",
                expected="a value in each row",
                action=f"fill it, or name another `key` of raw table {table.name}",
            )
        elif not number:
            yield found(
                column=column,
                seen="no row has a value",
                action=f"take it out of `columns` of raw table {table.name}, or mend `null_text`",
                severity="warning",
            )
        elif table.columns[column] == "VARCHAR" and (twice := _spelled_twice(con, rows, column)):
            yield found(
                column=column,
                seen=f"values that differ in case or blanks only: {twice}",
                action=f"write them alike: lower(trim({column})) in a staging query",
                severity="warning",
            )
    if table.time_column and _is_a_date(con, rows, table.time_column, table.time_zone or "UTC"):
        yield found(
            column=table.time_column,
            seen="all times are midnights, so these are dates: rows count as known when days begin",
            action="where they are known in the evening, say so: known_after: 1d of feature "
            "tables, predict_after: 1d of the training set",
            severity="warning",
        )


def _is_a_date(con: duckdb.DuckDBPyConnection, rows: str, moment: str, zone: str) -> bool:
    local = f"timezone({sql_text(zone)}, {sql_name(moment)})"
    query = f"SELECT bool_and({local} = date_trunc('day', {local})) FROM {rows}"
    return bool(con.execute(query).fetchall()[0][0])


def _spelled_twice(con: duckdb.DuckDBPyConnection, rows: str, column: str) -> str:
    """Some values of a column with few values that are spelled in several ways."""
    name = sql_name(column)
    found = con.execute(
        f"SELECT list(v ORDER BY v) FROM (SELECT DISTINCT {name} AS v FROM {rows} "
        f"WHERE {name} IS NOT NULL LIMIT {FEW_VALUES}) GROUP BY lower(trim(v)) "
        "HAVING count(*) > 1 ORDER BY 1 LIMIT 3"
    ).fetchall()
    return "; ".join(" and ".join(map(repr, row[0])) for row in found)
