"""Land raw rows: read one window of each raw table, check columns and types, keep typed Parquet.

Nothing is corrected here. What does not fit is refused with a sentence; whether values make sense
is for the expectation suites.
"""

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow.parquet as pq

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import LandedRows, TableRef
from tasks.features.config import FeatureConfig
from tasks.features.offline.duck import duckdb_session, inside, names, sql_name, sql_text
from tasks.features.tables.copies import Source, about
from tasks.features.tables.formats import ZONE_AFTER_CLOCK, as_declared, reading_explained
from tasks.features.tables.raw_files import RawTable
from tasks.features.tables.sources import open_source
from tasks.governance.erasure import ErasedEntities, leave_out_rows, read_entities
from tasks.kernel.errors import DataContractError, TransientError, WindowError
from tasks.kernel.files import make_folder, scratch_folder
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key

logger = logging.getLogger(__name__)

NUM_EXAMPLES = 3
MEANING = {
    **dict.fromkeys(("BIGINT", "INTEGER"), "whole number"),
    **dict.fromkeys(("DOUBLE", "FLOAT"), "number"),
    "TIMESTAMPTZ": "time with a time zone",
}
LONGEST_YEARS = 100
"""Tables are made month by month: a mistyped year would keep a run for days."""

MOMENTS = ("TIMESTAMP WITH TIME ZONE", "TIMESTAMPTZ_NS")


def land_raw_rows(
    window: TimeWindow,
    config: FeatureConfig,
    repo: Path,
    store: ArtifactStore,
    *,
    reused: bool = True,
) -> LandedRows:
    """Copy the rows of `window` from every raw table into the artifact store, typed.

    Args:
        window: rows whose time column lies inside; a table without one is taken whole.
        config: raw tables with their columns and types.
        repo: feature repository, to which relative paths refer.
        store: where the Parquet files go.
        reused: other versions of this code may look for the rows there.

    Raises:
        WindowError: the window ends in the future, or is longer than is allowed. Nothing is
            touched.
        ConfigurationError: a source cannot be found.
        TransientError: a source does not answer, or was changed while it was read.
        DataContractError: a column is missing, a value has the wrong type, a time has no zone, or
            the window holds no rows of a table with history.
    """
    window.check_not_in_future(datetime.now(UTC))
    if window.end - window.start > timedelta(days=366 * LONGEST_YEARS):
        raise WindowError(
            f"window {window} is longer than {LONGEST_YEARS} years; check the years. Nothing was "
            "touched"
        )
    with scratch_folder("falaj-sources", make_folder(store.root)) as scratch:
        sources = {}
        for table in config.raw_tables:
            with about(table):
                sources[table.name] = open_source(table, repo, window, scratch / table.name)
        seen = [source.seen for source in sources.values()]
        code = code_digest(__file__) if reused else ""
        erased = read_entities(store.root.parent)
        more = filter(None, [erased])
        key = content_key(code, window, config.raw_tables, config.purpose, seen, *more)

        def build(folder: StagedFolder) -> LandedRows:
            with duckdb_session(folder.path.parent) as con:
                tables = []
                for table in config.raw_tables:
                    with about(table), reading_explained(table):
                        source = sources[table.name]
                        tables.append(_land_table(con, table, source, window, folder, erased))
            return LandedRows(window=window, tables=tuple(tables), handling=config.handling)

        return store.build_once("landed", key, LandedRows, build)


def _land_table(
    con: duckdb.DuckDBPyConnection,
    table: RawTable,
    source: Source,
    window: TimeWindow,
    folder: StagedFolder,
    erased: ErasedEntities | None,
) -> TableRef:
    relation = as_declared(con, table, source.bring(), window)
    seen = {row[0]: row[1] for row in con.execute(f"DESCRIBE SELECT * FROM {relation}").fetchall()}
    target = folder.path / f"{table.name}.parquet"
    read = {c: _read(table, c, kind, seen[c]) for c, kind in table.columns.items()}
    misfits = {c: f"{sql_name(c)} IS NOT NULL AND ({value}) IS NULL" for c, value in read.items()}
    typed = ", ".join(
        f"CASE WHEN {misfits[c]} THEN error('') ELSE {value} END AS {sql_name(c)}"
        for c, value in read.items()
    )
    query = f"SELECT {typed} FROM {relation}"
    if table.time_column:
        moment = sql_name(table.time_column)
        bounds = inside(table.time_column, window)
        query = f"SELECT * FROM ({query}) WHERE {bounds} OR {moment} IS NULL"
    order = names([*([table.time_column] if table.time_column else []), *table.key])
    try:
        con.execute(f"COPY ({query} ORDER BY {order}) TO {sql_text(target)} (FORMAT parquet)")
    except duckdb.Error:
        _explain_types(con, table, relation, misfits)
        raise
    _check_unchanged(table, source)
    if erased:
        leave_out_rows(target, erased)
    num_rows = pq.read_metadata(target).num_rows
    if not num_rows:
        raise DataContractError(
            f"{source.seen.uri} holds no rows in window {window}; expected at least one. Choose a "
            "window that the data covers"
        )
    origin = f"{source.seen.num_bytes:,} bytes of {source.seen.uri}"
    logger.info("landed %s rows of %s, from %s", f"{num_rows:,}", table.name, origin)
    artifact = folder.artifact(target.name)
    return TableRef(name=table.name, artifact=artifact, num_rows=num_rows, source=source.seen)


def _check_unchanged(table: RawTable, source: Source) -> None:
    """See that what was read is still what was found.

    Raises:
        TransientError: it is not; reading again may meet it whole.
    """
    if source.digest is None:
        return
    try:
        is_same = source.digest() == source.seen.sha256
    except OSError:  # gone, or another thing by now
        is_same = False
    if not is_same:
        raise TransientError(
            f"{source.seen.uri} was changed while it was read; expected it to stay as it was. "
            "Write files aside and rename them when they are whole; then run again"
        )


def _explain_types(
    con: duckdb.DuckDBPyConnection, table: RawTable, relation: str, misfits: dict[str, str]
) -> None:
    """Refuse rows that could not be typed, if it is for their values.

    Raises:
        DataContractError: some do not have their declared types.
    """
    counts = ", ".join(f"count(*) FILTER ({condition})" for condition in misfits.values())
    numbers = con.execute(f"SELECT {counts} FROM {relation}").fetchall()[0]
    faults = []
    for (column, condition), number in zip(misfits.items(), numbers, strict=True):
        if number:
            examples = con.execute(
                f"SELECT DISTINCT {sql_name(column)}::VARCHAR FROM {relation} "
                f"WHERE {condition} ORDER BY 1 LIMIT {NUM_EXAMPLES}"
            ).fetchall()
            shown = ", ".join(repr(row[0]) for row in examples)
            wanted = MEANING.get(table.columns[column], table.columns[column])
            faults.append(f"{column} has {number} value(s) that are no {wanted}, such as {shown}")
    if faults:
        raise DataContractError(
            f"{'; '.join(faults)}. Mend the file or its declaration: null_text (now "
            f"{table.null_text!r}) names what stands for a missing value, time_zone (now "
            f"{table.time_zone}) the zone of times without one"
        )


def _read(table: RawTable, column: str, kind: str, seen: str) -> str:
    """SQL of a value in its declared type, null where it does not have it.

    Times without a zone get the table's. Where there is none, nobody can know theirs.
    """
    value = sql_name(column)
    read = f"TRY_CAST({value} AS {kind})"
    if kind in ("BIGINT", "INTEGER"):  # a cast alone would round 1.5
        return f"CASE WHEN TRY_CAST({value} AS DOUBLE) = {read} THEN {read} END"
    if kind != "TIMESTAMPTZ" or seen in MOMENTS:
        return read
    zone, with_zone = "NULL", r"(Z|[+-]\d{2}(:?\d{2})?)$"
    if table.time_zone:
        zone, with_zone = sql_text(table.time_zone), ZONE_AFTER_CLOCK
    local = f"timezone({zone}, TRY_CAST({value} AS TIMESTAMP))"
    if seen != "VARCHAR":
        return local
    return f"CASE WHEN regexp_matches({value}, {sql_text(with_zone)}) THEN {read} ELSE {local} END"
