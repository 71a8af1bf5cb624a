"""Raw tables: read as a run would read them, and the line of a value that cannot be read."""

import ast
import csv
import re
from datetime import timedelta
from pathlib import Path

import duckdb

from falaj.onboarding.findings import Findings, Severity, advised, did_you_mean, nearest
from flows.config import PipelineConfig
from tasks.contracts.data import LandedRows, TableRef
from tasks.features.config import FeatureConfig
from tasks.features.declared.aggregates import span
from tasks.features.offline.duck import duckdb_session, names, parquet, sql_name, sql_text
from tasks.features.tables.formats import DELIMITERS, format_of, own_names, unpacked
from tasks.features.tables.landing import land_raw_rows
from tasks.features.tables.raw_files import RawTable
from tasks.kernel.errors import ConfigurationError, DataContractError, WindowError
from tasks.kernel.settings import USE_CASE_FILE, ArtifactStore, StagedFolder

CHECK = "rows"
SAMPLE_ROWS = 30_000
"""So many rows of a table, or a few more, are looked at further."""
FEW_VALUES = 1000
EVENING = timedelta(hours=12)
"""With a `known_after` of this at least somebody has thought of it; `falaj init` writes 1h."""
MISSING = re.compile(r"column\(s\) (.+) are missing; the file has (.+?)\. Send")
MISFIT = re.compile(
    r"(\w+) has (\d+) value\(s\) that are no (.+?), such as (.+?)(?=; \w+ has |\. Mend)"
)


def land(config: PipelineConfig, findings: Findings, store: ArtifactStore) -> LandedRows | None:
    """Land every raw table by itself, so that each mistake is seen; None where one is."""
    tables: list[TableRef] = []
    for table in config.features.raw_tables:
        alone = config.features.model_copy(update={"raw_tables": (table,)})
        try:
            rows = land_raw_rows(config.window, alone, findings.repo, store, reused=False)
            tables += rows.tables
        except ConfigurationError as exc:
            path = findings.repo / table.uri
            others = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
            near = did_you_mean(path.name, others)
            place = findings.at("features", "raw_tables", table.name, "uri")
            findings.add_error(exc, CHECK, place, f"{near}put the file there or mend the uri")
        except WindowError as exc:
            findings.add_error(exc, "splits", findings.at("splits"), "end it before now")
            break
        except DataContractError as exc:
            _add_refusal(exc, table, findings, store.root / "unpacked")
    return None if findings.found else LandedRows(window=config.window, tables=tuple(tables))


def _add_refusal(
    exc: DataContractError, table: RawTable, findings: Findings, scratch: Path
) -> None:
    """What is wrong with a file that was refused, with its line where it is text."""
    if missing := MISSING.search(str(exc)):
        absent, present = missing[1].split(", "), missing[2].split(", ")
        if len(absent) == len(table.columns):
            _add_nameless(table, present, findings)
            return
        for name in absent:
            _add_missing(table, name, present, findings)
    elif misfits := MISFIT.findall(str(exc)):
        for column, count, kind, shown in misfits:
            values, types = ast.literal_eval(f"[{shown}]"), table.columns[column]
            line, seen = _line_of(findings.repo / table.uri, table, column, values, scratch)
            advice = advised(f"{types} {values[0]}") or (
                f"mend the value, or declare another type than {types}"
            )
            findings.add(
                "wrong-type",
                (table.uri, line),
                column,
                value=seen or values[0],
                number=int(count),
                kind=kind,
                type=types,
                advice=advice.replace("{value}", repr(values[0])),
                declared=findings.at("features", "raw_tables", table.name)[1],
            )
    else:
        findings.add_error(exc, CHECK, (table.uri, None))


def _add_missing(table: RawTable, name: str, present: list[str], findings: Findings) -> None:
    declared = findings.at("features", "raw_tables", table.name, "columns", name)
    advice = "send the file with it, or take it out of `columns`"
    if near := nearest(name, present):
        own = own_names(table)[name]
        change = f"mend the name {own}" if own != name else f"add `rename: {{{near}: {name}}}`"
        advice = f"did you mean {near}? {change}"
    findings.add(
        "no-column",
        (table.uri, 1),
        name,
        table=table.name,
        name=name,
        present=", ".join(present),
        advice=f"{advice} in {USE_CASE_FILE}:{declared[1]}",
    )


def _add_nameless(table: RawTable, present: list[str], findings: Findings) -> None:
    advice = "write the names of its columns into the first line, or declare those that it has"
    if len(present) == 1:
        advice = "separate the columns by a comma, semicolon, tab or |: it reads as one column"
    findings.add(
        "no-names",
        (table.uri, 1),
        table=table.name,
        advice=advice,
        present=", ".join(present),
        columns=", ".join(table.columns),
    )


def _line_of(
    path: Path, table: RawTable, column: str, values: list[str], scratch: Path
) -> tuple[int | None, str | None]:
    """First line of a text file in which a column has one of some values, and that value."""
    if not path.is_file() or format_of(path.name) != "CSV":
        return None, None
    own, place = own_names(table)[column], None
    with unpacked(path, scratch).open(encoding="utf-8-sig", newline="") as stream:
        first = stream.readline()
        stream.seek(0)
        reader = csv.reader(stream, delimiter=max(DELIMITERS, key=first.count))
        for cells in reader:
            stripped = [cell.strip() for cell in cells]
            if place is None:
                place = stripped.index(own) if own in stripped else None
            elif place < len(stripped) and stripped[place] in values:
                return reader.line_num, stripped[place]
    return None, None


def sample(
    landed: LandedRows, config: PipelineConfig, findings: Findings, store: ArtifactStore
) -> LandedRows:
    """A sample of every landed table; what all rows show is found on the way.

    All rows that a key without its time names are in it or none, so that a series stays whole.
    """

    def build(folder: StagedFolder) -> LandedRows:
        refs = []
        with duckdb_session(store.root) as con:
            for table, ref in zip(config.features.raw_tables, landed.tables, strict=True):
                rows = parquet(store.path(ref.artifact, verify=False))
                _check_rows(con, table, rows, findings, config.features)
                whole = names([name for name in table.key if name != table.time_column])
                if whole and ref.num_rows > SAMPLE_ROWS:
                    file = folder.path / f"{table.name}.parquet"
                    con.execute(
                        f"COPY (SELECT * FROM {rows} WHERE hash({whole}) <= (SELECT min(h) FROM "
                        "(SELECT h, sum(count(*)) OVER (ORDER BY h) AS up_to FROM "
                        f"(SELECT hash({whole}) AS h FROM {rows}) GROUP BY h) "
                        f"WHERE up_to >= {SAMPLE_ROWS})) TO {sql_text(file)} (FORMAT parquet)"
                    )
                    ref = ref.model_copy(update={"artifact": folder.artifact(file.name)})
                refs.append(ref)
        return LandedRows(window=landed.window, tables=tuple(refs))

    return store.build_once("sample", "rows", LandedRows, build)


def _check_rows(
    con: duckdb.DuckDBPyConnection,
    table: RawTable,
    rows: str,
    findings: Findings,
    features: FeatureConfig,
) -> None:
    place, key = (table.uri, None), names(list(table.key))
    doubled, example = con.execute(
        f"SELECT count(*), any_value(k) FROM (SELECT row({key})::VARCHAR AS k FROM {rows} "
        f"GROUP BY {key} HAVING count(*) > 1)"
    ).fetchall()[0]
    if doubled:
        # A run refuses rows of one key, unless somebody's own suite leaves that out.
        suite = findings.repo / "expectations" / f"{table.suite}.yaml"
        is_refused = not suite.is_file() or "_unique" in suite.read_text(encoding="utf-8")
        grave: Severity = "error" if is_refused else "warning"
        values = {"number": doubled, "example": example, "table": table.name}
        findings.add("key-twice", place, "+".join(table.key), severity=grave, **values)
    counts = ", ".join(f"count({sql_name(column)})" for column in table.columns)
    total, *known = con.execute(f"SELECT count(*), {counts} FROM {rows}").fetchall()[0]
    for column, number in zip(table.columns, known, strict=True):
        if column in table.key and number < total:
            values = {"number": total - number, "total": total, "table": table.name}
            findings.add("key-missing", place, column, **values)
        elif not number:
            findings.add("no-value", place, column, table=table.name)
        elif table.columns[column] == "VARCHAR" and (twice := _spelled_twice(con, rows, column)):
            findings.add("spelled-twice", place, column, examples=twice)
    if table.time_column and not _says_when_known(features):
        zone = sql_text(table.time_zone or "UTC")
        local = f"timezone({zone}, {sql_name(table.time_column)})"
        query = f"SELECT bool_and({local} = date_trunc('day', {local})) FROM {rows}"
        if con.execute(query).fetchall()[0][0]:
            findings.add("dates", place, table.time_column)


def _says_when_known(features: FeatureConfig) -> bool:
    """Whether it is said of all rows that no query makes when they are known."""
    tables, spec = features.feature_tables, features.training_set
    made = [span(t.known_after) >= EVENING for t in tables if t.source and not t.static]
    made += ["predict_after" in spec.model_fields_set] if spec.source else []
    return bool(made) and all(made)


def _spelled_twice(con: duckdb.DuckDBPyConnection, rows: str, column: str) -> str:
    """Some values of a column with few values that are spelled in several ways."""
    name = sql_name(column)
    spelled = con.execute(
        f"SELECT list(v ORDER BY v) FROM (SELECT DISTINCT {name} AS v FROM {rows} "
        f"WHERE {name} IS NOT NULL LIMIT {FEW_VALUES}) GROUP BY lower(trim(v)) "
        "HAVING count(*) > 1 ORDER BY 1 LIMIT 3"
    ).fetchall()
    return "; ".join(" and ".join(map(repr, row[0])) for row in spelled)
