"""Land raw rows: read one window of each raw table, check columns and types, keep typed Parquet.

Nothing is corrected here. What does not fit is refused with a sentence; whether values make sense
is for the expectation suites.
"""

from __future__ import annotations

import importlib.util
import logging
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import duckdb

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import LandedRows, SourceFile, TableRef
from tasks.errors import ConfigurationError, DataContractError, WindowError
from tasks.features.config import FeatureConfig, RawTable
from tasks.features.duck import duckdb_session, names, sql_name, sql_text
from tasks.settings import (
    ArtifactStore,
    StagedFolder,
    code_digest,
    content_key,
    digest_of,
    size_of,
)

logger = logging.getLogger(__name__)

NUM_EXAMPLES = 3

ZONE_AFTER_CLOCK = r":[0-9.]+ ?(Z|[+-]\d{2}(:?\d{2})?)$"

MAX_YEARS = 20
"""Longest window. Tables are made month by month, so a mistyped year would keep a run for days."""


def land_raw_rows(
    window: TimeWindow, config: FeatureConfig, repo: Path, store: ArtifactStore
) -> LandedRows:
    """Copy the rows of `window` from every raw table into the artifact store, typed.

    Args:
        window: rows whose time column lies inside; a table without one is taken whole.
        config: raw tables with their columns and types.
        repo: feature repository, to which relative paths refer.
        store: where the Parquet files go.

    Raises:
        WindowError: the window ends in the future, or is longer than `MAX_YEARS`. Nothing is
            touched.
        ConfigurationError: a source cannot be found.
        DataContractError: a column is missing, a value has the wrong type, a time has no zone, or
            the window holds no rows of a table with history.
    """
    window.check_not_in_future(datetime.now(UTC))
    _check_length(window)
    sources = {table.name: locate_source(table, repo) for table in config.raw_tables}
    key = content_key(
        code_digest(__file__), window, list(config.raw_tables), list(sources.values())
    )

    def build(folder: StagedFolder) -> LandedRows:
        with duckdb_session(
            folder.path.parent, memory_limit_mb=config.memory_limit_mb, threads=config.threads
        ) as con:
            tables = tuple(
                _land_table(con, table, sources[table.name], window, folder)
                for table in config.raw_tables
            )
        return LandedRows(window=window, tables=tables)

    return store.build_once("landed", key, LandedRows, build)


def _check_length(window: TimeWindow) -> None:
    if window.end - window.start > timedelta(days=366 * MAX_YEARS):
        raise WindowError(
            f"window {window} is longer than {MAX_YEARS} years; check the years, or refresh longer "
            "history in parts. Nothing was touched"
        )


def locate_source(table: RawTable, repo: Path) -> Path:
    """Local path of a raw table's file; a package is located without being imported.

    Raises:
        ConfigurationError: there is no such package or file.
    """
    parts = urlsplit(table.uri)
    if parts.scheme == "package":
        spec = importlib.util.find_spec(parts.netloc)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigurationError(
                f"raw table {table.name}: package {parts.netloc!r} is not installed; install it or "
                f"change the uri {table.uri!r} in the feature repository"
            )
        path = Path(spec.submodule_search_locations[0]) / parts.path.lstrip("/")
    elif parts.scheme in ("", "file"):
        path = repo / parts.path
    else:
        raise ConfigurationError(
            f"raw table {table.name}: cannot read {table.uri!r}; expected package://..., or the "
            "path of a CSV, zipped CSV or Parquet file"
        )
    if not path.is_file():
        raise ConfigurationError(f"raw table {table.name}: {table.uri!r} names no file ({path})")
    return path


def _land_table(
    con: duckdb.DuckDBPyConnection,
    table: RawTable,
    source: Path,
    window: TimeWindow,
    folder: StagedFolder,
) -> TableRef:
    readable = _unpack(source, folder.path)
    relation = _as_written(table, readable)
    _check_columns(con, table, relation)
    _check_types(con, table, relation)
    target = folder.path / f"{table.name}.parquet"
    seen = _seen_types(con, relation)
    typed = ", ".join(
        f"{_typed(table, c, kind, seen[c])} AS {sql_name(c)}" for c, kind in table.columns.items()
    )
    query = f"SELECT {typed} FROM {relation}"
    if table.time_column:
        moment = sql_name(table.time_column)
        start, end = (sql_text(t.isoformat()) for t in (window.start, window.end))
        inside = f"{moment} >= {start}::TIMESTAMPTZ AND {moment} < {end}::TIMESTAMPTZ"
        query = f"SELECT * FROM ({query}) WHERE ({inside}) OR {moment} IS NULL"
    order = names([*([table.time_column] if table.time_column else []), *table.key])
    con.execute(f"COPY ({query} ORDER BY {order}) TO {sql_text(target)} (FORMAT parquet)")
    if readable != source:
        readable.unlink()
    num_rows = con.execute(f"SELECT count(*) FROM read_parquet({sql_text(target)})").fetchall()[0][
        0
    ]
    if not num_rows:
        raise DataContractError(
            f"raw table {table.name}: {source.name} holds no rows in window {window}; expected at "
            "least one. Choose a window that the data covers. Nothing was landed"
        )
    logger.info("landed %s rows of %s", f"{num_rows:,}", table.name)
    return TableRef(
        name=table.name,
        artifact=folder.artifact(f"{table.name}.parquet"),
        num_rows=num_rows,
        source=SourceFile(uri=table.uri, sha256=digest_of(source), num_bytes=size_of(source)),
    )


def _unpack(source: Path, folder: Path) -> Path:
    """A zip's only member, written under `folder`; any other file as it is."""
    if source.suffix != ".zip":
        return source
    with zipfile.ZipFile(source) as archive:
        members = [m for m in archive.infolist() if not m.is_dir()]
        if len(members) != 1:
            raise DataContractError(
                f"{source.name} holds {len(members)} files, expected one CSV; unpack it and name "
                "the file itself. Nothing was landed"
            )
        suffix = Path(members[0].filename).suffix
        # Some writers name a CSV inside after the archive around it.
        target = folder / f"unpacked{'.csv' if suffix == '.zip' else suffix}"
        with archive.open(members[0]) as packed, target.open("wb") as unpacked:
            while chunk := packed.read(1 << 20):
                unpacked.write(chunk)
    return target


def _as_written(table: RawTable, path: Path) -> str:
    """A relation with the values before any typing: text from CSV, own types from Parquet."""
    if path.suffix == ".parquet":
        return f"read_parquet({sql_text(path)})"
    return (
        f"read_csv({sql_text(path)}, header = true, all_varchar = true, "
        f"nullstr = {sql_text(table.null_text)})"
    )


def _check_columns(con: duckdb.DuckDBPyConnection, table: RawTable, relation: str) -> None:
    try:
        present = [row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {relation}").fetchall()]
    except duckdb.InvalidInputException as exc:
        reason = str(exc).splitlines()[0]
        raise DataContractError(
            f"raw table {table.name}: the file cannot be read as a table ({reason}); expected a "
            f"header and the columns {', '.join(table.columns)}. Nothing was landed"
        ) from exc
    if missing := [c for c in table.columns if c not in present]:
        raise DataContractError(
            f"raw table {table.name}: column(s) {', '.join(missing)} are missing; the file has "
            f"{', '.join(present)}. Send the file with all declared columns, or change the "
            "declaration in the feature repository. Nothing was landed"
        )


def _check_types(con: duckdb.DuckDBPyConnection, table: RawTable, relation: str) -> None:
    seen = _seen_types(con, relation)
    conditions = {c: _misfit(table, c, kind, seen[c]) for c, kind in table.columns.items()}
    counts = ", ".join(f"count(*) FILTER ({condition})" for condition in conditions.values())
    numbers = con.execute(f"SELECT {counts} FROM {relation}").fetchall()[0]
    faults = []
    for (column, condition), number in zip(conditions.items(), numbers, strict=True):
        if number:
            examples = con.execute(
                f"SELECT DISTINCT {sql_name(column)}::VARCHAR FROM {relation} "
                f"WHERE {condition} ORDER BY 1 LIMIT {NUM_EXAMPLES}"
            ).fetchall()
            shown = ", ".join(repr(row[0]) for row in examples)
            wanted = _meaning(table.columns[column])
            faults.append(f"{column} has {number} value(s) that are no {wanted}, such as {shown}")
    if faults:
        raise DataContractError(
            f"raw table {table.name}: {'; '.join(faults)}. Mend the file or its declaration. "
            "Nothing was landed"
        )


def _seen_types(con: duckdb.DuckDBPyConnection, relation: str) -> dict[str, str]:
    described = con.execute(f"DESCRIBE SELECT * FROM {relation}").fetchall()
    return {row[0]: row[1] for row in described}


def _typed(table: RawTable, column: str, kind: str, seen: str) -> str:
    """SQL value of a column in its declared type; times without a zone get the table's."""
    value = sql_name(column)
    if kind != "TIMESTAMPTZ" or table.time_zone is None or seen == "TIMESTAMP WITH TIME ZONE":
        return f"CAST({value} AS {kind})"
    local = f"timezone({sql_text(table.time_zone)}, TRY_CAST({value} AS TIMESTAMP))"
    if seen != "VARCHAR":
        return local
    return f"CASE WHEN {_has_zone(value)} THEN TRY_CAST({value} AS TIMESTAMPTZ) ELSE {local} END"


def _has_zone(value: str) -> str:
    return f"regexp_matches({value}, {sql_text(ZONE_AFTER_CLOCK)})"


def _misfit(table: RawTable, column: str, kind: str, seen: str) -> str:
    """SQL condition that is true for values which do not have the declared type."""
    value = sql_name(column)
    if kind == "TIMESTAMPTZ" and table.time_zone is not None:
        return f"{value} IS NOT NULL AND ({_typed(table, column, kind, seen)}) IS NULL"
    misfit = f"{value} IS NOT NULL AND TRY_CAST({value} AS {kind}) IS NULL"
    if kind in ("BIGINT", "INTEGER"):  # a cast alone would round 1.5
        return f"{misfit} OR TRY_CAST({value} AS DOUBLE) <> TRY_CAST({value} AS {kind})"
    if kind != "TIMESTAMPTZ":
        return misfit
    if seen == "VARCHAR":
        zone = sql_text(r"(Z|[+-]\d{2}(:?\d{2})?)$")
        return f"{misfit} OR NOT regexp_matches({value}, {zone})"
    # A file that stores times without a zone has them in a zone that nobody can know.
    return misfit if seen == "TIMESTAMP WITH TIME ZONE" else f"{value} IS NOT NULL"


def _meaning(kind: str) -> str:
    return {
        "BIGINT": "whole number",
        "INTEGER": "whole number",
        "DOUBLE": "number",
        "FLOAT": "number",
        "TIMESTAMPTZ": "time with a time zone",
    }.get(kind, kind)
