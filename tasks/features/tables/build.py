"""Feature tables: one immutable version after the other, each holding all raw and feature rows.

A version is a folder of Parquet files, one a month, in the artifact store. A refresh makes the next
version from the one before: months that the window does not touch are linked, the others are
written anew. Readers follow one symbolic link, which moves only when a version is whole and
validated.

Features at a moment depend only on raw rows of a bounded past (`lookback_hours`), so refreshing a
year at once or month by month, in any order, gives the same rows.

What a feature table's query gave: its columns, keys and times, checked before it is written.
"""

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
from pydantic import ValidationError

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureTables, TableRef, ValidatedRows, ValidationResult
from tasks.features.checks.before_publish import PROBED, check_same_data, check_same_rows, probes
from tasks.features.config import CLOCK_SKEW, LONGEST_LAG, FeatureConfig, FeatureTable
from tasks.features.declared.queries import read_query, table_query
from tasks.features.offline.duck import (
    duckdb_session,
    endless_numbers,
    inside,
    names,
    parquet,
    set_window,
    sql_moment,
    sql_name,
    sql_text,
)
from tasks.features.offline.spark_tables import SparkTables
from tasks.kernel import errors
from tasks.kernel.files import flush_to_disk
from tasks.kernel.settings import ArtifactStore, StagedFolder, bring, code_digest, content_key, put

logger = logging.getLogger(__name__)


def check_computed(con: duckdb.DuckDBPyConnection, table: FeatureTable, window: TimeWindow) -> None:
    """Check the table `computed`.

    Args:
        window: what the query was asked for.

    Raises:
        ConfigurationError: a column is missing.
        DataContractError: a key is null or has two rows at one moment, a number is infinite, or a
            time lies after the window or in the future.
    """
    check_columns(table, [row[0] for row in con.execute("DESCRIBE computed").fetchall()])
    _check_keys(con, table)
    if endless := endless_numbers(con, "computed", table.unbounded):
        raise errors.DataContractError(
            f"feature table {table.name}: {endless}; expected numbers. Divide by "
            f"nullif(..., 0) in {table.origin}, or name the column among `unbounded` of the table "
            "in use_case.yaml. Nothing was published"
        )
    _check_times(con, table, window)


def check_columns(table: FeatureTable, present: Collection[str]) -> None:
    """See that a query gives the columns that every feature table has.

    Raises:
        ConfigurationError: one is missing.
    """
    needed = {*table.entity_keys, "event_timestamp", "created"}
    if missing := sorted(needed - set(present)):
        raise errors.ConfigurationError(
            f"query {table.origin} gives no column {', '.join(missing)}; a feature table needs its "
            f"keys, event_timestamp and created. It gives {', '.join(present)}. Nothing was changed"
        )


def _check_keys(con: duckdb.DuckDBPyConnection, table: FeatureTable) -> None:
    keys = names([*table.entity_keys, "event_timestamp"])
    nulls = " OR ".join(f"{sql_name(k)} IS NULL" for k in (*table.entity_keys, "event_timestamp"))
    doubled = con.execute(
        f"SELECT count(*) FROM (SELECT 1 FROM computed GROUP BY {keys} HAVING count(*) > 1)"
    ).fetchall()[0][0]
    nameless = con.execute(f"SELECT count(*) FROM computed WHERE {nulls}").fetchall()[0][0]
    if doubled or nameless:
        raise errors.DataContractError(
            f"feature table {table.name}: {doubled} key(s) have two rows at one moment and "
            f"{nameless} row(s) have a null key or time; expected one row a key and moment. "
            "Check the raw rows for duplicates. Nothing was published"
        )


def _check_times(con: duckdb.DuckDBPyConnection, table: FeatureTable, window: TimeWindow) -> None:
    """Refuse what cannot be known yet."""
    now = datetime.now(UTC)
    end = now + CLOCK_SKEW if table.static else window.end
    event, created = "event_timestamp::TIMESTAMPTZ", "created::TIMESTAMPTZ"
    late, newest, ahead, latest = con.execute(
        f"SELECT count(*) FILTER ({event} >= $end::TIMESTAMPTZ), max({event}), "
        f"count(*) FILTER ({created} > $latest::TIMESTAMPTZ), max({created}) FROM computed",
        {"end": end, "latest": now + LONGEST_LAG},
    ).fetchall()[0]
    if late:
        raise errors.DataContractError(
            f"feature table {table.name}: {late:,} row(s) have an event_timestamp at or after "
            f"{end:%Y-%m-%dT%H:%MZ}, the newest {newest.isoformat()}; expected moments before "
            f"{'now' if table.static else 'the end of the window'}, from which the values are "
            f"known. Mend the times, or bound them in {table.origin} by "
            "getvariable('window_end'). Nothing was published"
        )
    if ahead:
        raise errors.DataContractError(
            f"feature table {table.name}: {ahead:,} row(s) have a created that is more than "
            f"{LONGEST_LAG} after now, the latest {latest.isoformat()}; expected the moment at "
            f"which a row is in the store. Mend {table.origin} or its raw rows. "
            "Nothing was published"
        )


EMPTY = FeatureTables(version="0" * 32, raw=(), tables=(), sources={})
LINK = Path("feature_tables") / "current"
PUBLISHED = Path("feature_tables") / "published"
"""File with the key of the published version."""
TABLES = "tables"
RAW = "raw"
FEATURES = "features"


def current_tables(home: Path, store: ArtifactStore) -> FeatureTables:
    """The published version, or `EMPTY` where none is published yet.

    Raises:
        ArtifactError: a version is published, but what describes it is gone or damaged.
    """
    _follow(home, store)
    if not (home / LINK).is_symlink():
        return EMPTY
    file = published_path(home).parent / "value.json"
    try:
        return FeatureTables.model_validate_json(file.read_bytes())
    except (FileNotFoundError, ValidationError) as exc:
        raise errors.ArtifactError(
            f"{file} is {'gone' if isinstance(exc, OSError) else 'damaged'}; expected the "
            "description of the published feature tables. Bring a backup with `falaj restore`, or "
            f"remove {home / LINK} and refresh all windows again. Nothing was changed"
        ) from exc


def _follow(home: Path, store: ArtifactStore) -> None:
    """Let readers on this machine see the version that another one published."""
    pointer = bring(home / PUBLISHED)
    if store.location is None or not pointer.exists():
        return
    key = pointer.read_text(encoding="utf-8").strip()
    folder = store.root / TABLES / key / FEATURES
    if published_path(home) == folder.resolve() and folder.is_dir():
        return
    tables = store.find(TABLES, key, FeatureTables)
    if tables is None:
        raise errors.ArtifactError(
            f"{pointer} names the feature tables {key}, which {store.location.url} lacks; expected "
            "the published ones. Bring a backup with `falaj restore`, or remove the file there and "
            "refresh all windows again. Nothing was changed"
        )
    _lead_to(_brought(tables, store), home)


def _brought(tables: FeatureTables, store: ArtifactStore) -> Path:
    for table in tables.tables:
        store.path(table.artifact, verify=False)
    return features_folder(tables, store)


def published_path(home: Path) -> Path:
    """Folder of the published feature tables, link resolved: a reader keeps one version."""
    return (home / LINK).resolve()


def features_folder(tables: FeatureTables, store: ArtifactStore) -> Path:
    """Folder that holds the feature tables of a version, each in a folder of its name."""
    return store.path(tables.tables[0].artifact, verify=False).parent


def build_feature_tables(
    validated: ValidatedRows,
    base: FeatureTables,
    config: FeatureConfig,
    repo: Path,
    store: ArtifactStore,
) -> FeatureTables:
    """Make the version that follows `base`: the window's raw rows replaced, features recomputed.

    Returns `base` itself where it already holds exactly these rows by these rules. A window that
    was changed later also changes features after it, as far as the lookback reaches; those are
    recomputed too.

    Raises:
        ConfigurationError: a query of the feature repository is wrong, reads further back than
            its table says or what is not known yet, or the rows are of other data than those of
            `base`.
        DataContractError: a query gives two rows for one key and moment, a null key, or a time that
            lies after the window or in the future.
    """
    landed = validated.landed
    source = content_key(_rules_digest(config, repo), [t.artifact.sha256 for t in landed.tables])
    name = f"{landed.window.start.isoformat()}/{landed.window.end.isoformat()}"
    if base.sources.get(name) == source and base.handling == landed.handling:
        return base
    check_same_data(landed, base, config, store)
    made_from = [base.version, base.sources, name, source, landed.handling]
    key = content_key(code_digest(__file__), *made_from)

    def build(folder: StagedFolder) -> FeatureTables:
        with duckdb_session(folder.path.parent) as con, SparkTables.chosen(repo, store) as spark:
            draft = _Draft(con, config, repo, spark, store, base, folder)
            draft.merge_raw(validated)
            draft.compute_features(landed.window, [*base.sources, name])
            version = draft.content_digest()
        raw = tuple(draft.reference(RAW, t.name) for t in config.raw_tables)
        return FeatureTables(
            version=version,
            raw=raw,
            tables=tuple(draft.reference(FEATURES, t.name) for t in config.feature_tables),
            sources={**base.sources, name: source},
            follows={ref.name: ref.artifact.sha256 for ref in base.raw},
            handling=landed.handling,
        )

    return store.build_once(TABLES, key, FeatureTables, build)


def publish_tables(
    tables: FeatureTables,
    validations: tuple[ValidationResult, ...],
    home: Path,
    store: ArtifactStore,
) -> None:
    """Let readers see this version: move the link in one step.

    Raises:
        DataContractError: no validation result vouches for one of the tables.
    """
    vouched = {v.subject_sha256 for v in validations}
    if unproven := [t.name for t in tables.tables if t.artifact.sha256 not in vouched]:
        raise errors.DataContractError(
            f"feature table(s) {', '.join(unproven)} of version {tables.version[:12]} have no "
            "validation result; validate them first. Nothing was published"
        )
    folder = _brought(tables, store)
    put(home / PUBLISHED, folder.parent.name + "\n")
    _lead_to(folder, home)


def _lead_to(folder: Path, home: Path) -> None:
    link = home / LINK
    with errors.refused_writes_explained(link):
        link.parent.mkdir(parents=True, exist_ok=True)
        aside = link.with_name(f".current-{os.getpid()}")
        aside.unlink(missing_ok=True)
        aside.symlink_to(os.path.relpath(folder, link.parent), target_is_directory=True)
        aside.replace(link)
        flush_to_disk(link.parent)


def run_query(con: duckdb.DuckDBPyConnection, statement: str, name: str) -> None:
    """Run a statement made from the query file `name`; its mistakes become a sentence."""
    try:
        con.execute(statement)
    except (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException) as exc:
        reason = " ".join(str(exc).split())
        raise errors.ConfigurationError(
            f"query {name} of the feature repository is wrong: {reason}. Nothing was changed"
        ) from exc
    except (duckdb.DataError, duckdb.InvalidInputException) as exc:
        reason = " ".join(str(exc).split())
        raise errors.DataContractError(
            f"query {name} met a value it cannot work with: {reason}. Nothing was changed"
        ) from exc


@dataclass(frozen=True)
class Queries:
    """The queries of a use case over its raw tables, and what runs them.

    Attributes:
        repo: folder of the query files.
        spark: computes the rows; None: DuckDB does, which else learns the columns alone.
    """

    con: duckdb.DuckDBPyConnection
    config: FeatureConfig
    repo: Path
    spark: SparkTables | None

    def register_raw(
        self,
        folders: Mapping[str, Path],
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> None:
        """Make raw tables, and the staging queries over them, readable by name.

        Args:
            folders: folder of Parquet files of each raw table.
            since: rows older than this are left out; None for all.
            until: rows from this moment on are left out; None for all.
        """
        for table in self.config.raw_tables:
            rows = f"SELECT * FROM {parquet(folders[table.name])}"
            moment = sql_name(table.time_column) if table.time_column else ""
            bounds = [f"{moment} >= {sql_moment(since)}"] if since and moment else []
            bounds += [f"{moment} < {sql_moment(until)}"] if until and moment else []
            rows += f" WHERE {' AND '.join(bounds)}" if bounds else ""
            self.con.execute(f"CREATE OR REPLACE TEMP VIEW {sql_name(table.name)} AS {rows}")
            if self.spark:
                self.spark.read(table.name, folders[table.name], table.time_column, since)
        for query in self.config.staging:
            text = read_query(self.repo, query.sql).strip().rstrip(";")
            made = f"CREATE OR REPLACE TEMP TABLE {sql_name(query.name)} AS {text}"
            run_query(self.con, made + "\nWITH NO DATA" * (self.spark is not None), query.sql)
            if self.spark:
                self.spark.stage(query.name, text, query.sql)

    def compute(self, table: FeatureTable, window: TimeWindow, name: str) -> None:
        """Compute a feature table for a window from the raw rows that are readable, into `name`.

        Spark computes it month by month, each from the raw rows that the query reads for it.
        """
        text = table_query(self.repo, table, self.config)
        parts = [window] if self.spark is None or table.static else by_month(window)
        kind = "VIEW" if self.spark else "TABLE"
        rows = " UNION ALL ".join(self.rows_of(text, each, table.origin) for each in parts)
        run_query(self.con, f"CREATE OR REPLACE TEMP {kind} {name} AS {rows}", table.origin)

    def rows_of(self, text: str, window: TimeWindow, origin: str) -> str:
        """SQL of a query's rows in a window: the query, or a reading of what Spark computed."""
        set_window(self.con, window)
        if self.spark is None:
            return text
        run_query(self.con, f"DESCRIBE {text}", origin)
        kinds = {row[0]: row[1] for row in self.con.fetchall()}
        return self.spark.rows(text, window, origin, kinds)


def _rules_digest(config: FeatureConfig, repo: Path) -> str:
    staging = [[query, read_query(repo, query.sql)] for query in config.staging]
    tables = [[table, table_query(repo, table, config)] for table in config.feature_tables]
    return content_key(list(config.raw_tables), [*staging, *tables])


def by_month(window: TimeWindow) -> Iterator[TimeWindow]:
    """The parts of a window that lie in one UTC month each."""
    start = window.start
    month = start.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    while start < window.end:
        month = (month + timedelta(days=32)).replace(day=1)
        yield TimeWindow(start=start, end=min(month, window.end))
        start = month


@dataclass(frozen=True)
class _Draft(Queries):
    """The next version while it is written into a staged folder."""

    store: ArtifactStore
    base: FeatureTables
    folder: StagedFolder

    def merge_raw(self, validated: ValidatedRows) -> None:
        """Replace the window's rows of every raw table."""
        landed = validated.landed
        files = {t.name: self.store.path(t.artifact) for t in landed.tables}
        for table in self.config.raw_tables:
            rows = f"(SELECT * FROM {parquet(files[table.name])})"
            self._replace(RAW, table.name, rows, table.time_column, table.key, landed.window)

    def compute_features(self, window: TimeWindow, sources: Iterable[str]) -> None:
        """Recompute every feature table wherever the window's rows can be felt."""
        data_end = max(datetime.fromisoformat(name.split("/")[1]) for name in sources)
        lookback = timedelta(hours=max(t.lookback_hours for t in self.config.feature_tables))
        since = window.start - lookback
        folders = {t.name: self.folder.path / RAW / t.name for t in self.config.raw_tables}
        self.register_raw(folders, since)
        for table in self.config.feature_tables:
            reach = window.end + timedelta(hours=table.lookback_hours)
            felt = TimeWindow(start=window.start, end=max(window.end, min(reach, data_end)))
            self._compute(table, felt)
        by_duckdb = Queries(self.con, self.config, self.repo, spark=None)
        for table in self.config.feature_tables:
            rows = self.folder.path / FEATURES / table.name
            for probe in probes(self.con, table, rows, window):
                by_duckdb.register_raw(folders, max(since, probe.since or since), probe.until)
                by_duckdb.compute(table, probe.part or window, PROBED)
                check_same_rows(self.con, table, rows, probe)

    def reference(self, group: str, name: str) -> TableRef:
        """Name a finished table with its digest and number of rows."""
        files = sorted((self.folder.path / group / name).glob("*.parquet"))
        return TableRef(
            name=name,
            artifact=self.folder.artifact(f"{group}/{name}"),
            num_rows=sum(pq.read_metadata(file).num_rows for file in files),
        )

    def content_digest(self) -> str:
        """Digest of all rows, whatever their order and the files' bytes.

        How a file was put together shows in its bytes (DuckDB encodes a merged month otherwise than
        one computed at once), but two versions with the same rows are the same version.
        """
        content = []
        for folder in sorted(self.folder.path.glob("*/*/")):
            found = self.con.execute(
                f"SELECT count(*), sum(hash(rows)::HUGEINT)::VARCHAR FROM {parquet(folder)} AS rows"
            )
            content.append([folder.parent.name, folder.name, *found.fetchall()[0]])
        return content_key(content)

    def _compute(self, table: FeatureTable, felt: TimeWindow) -> None:
        self.compute(table, felt, "computed")
        check_computed(self.con, table, felt)
        time_column = None if table.static else "event_timestamp"
        key = (*table.entity_keys, "event_timestamp")
        self._replace(FEATURES, table.name, "computed", time_column, key, felt)
        logger.info("computed %s for %s", table.name, felt)

    def _replace(
        self,
        group: str,
        name: str,
        rows: str,
        time_column: str | None,
        key: tuple[str, ...],
        window: TimeWindow,
    ) -> None:
        """Write a table anew: `rows` inside the window, what was there before outside of it."""
        target = self.folder.path / group / name
        target.mkdir(parents=True)
        if time_column is None:
            self._write(f"SELECT * FROM {rows}", key, target / "static.parquet")
            return
        refs = self.base.raw if group == RAW else self.base.tables
        before = next((self.store.path(ref.artifact) for ref in refs if ref.name == name), None)
        touched = {f"{part.start:%Y%m}" for part in by_month(window)}
        for file in sorted(before.glob("*.parquet")) if before else []:
            if file.stem not in touched:
                os.link(file, target / file.name)
        moment = sql_name(time_column)
        for month in sorted(touched):
            part = f"SELECT * FROM {rows} WHERE strftime({moment}, '%Y%m') = {sql_text(month)}"
            old = before / f"{month}.parquet" if before else None
            if old and old.exists():
                kept = f"SELECT * FROM {parquet(old)} WHERE NOT {inside(time_column, window)}"
                part = f"{part} UNION ALL BY NAME {kept}"
            self._write(part, (time_column, *key), target / f"{month}.parquet")
        self._drop_empty_months(target)

    def _write(self, query: str, order: tuple[str, ...], target: Path) -> None:
        """Write sorted rows, so that equal content gives equal bytes."""
        with errors.refused_writes_explained(target):
            self.con.execute(
                f"COPY (SELECT * FROM ({query}) ORDER BY {names(order)}) TO {sql_text(target)} "
                "(FORMAT parquet, COMPRESSION zstd)"
            )

    @staticmethod
    def _drop_empty_months(target: Path) -> None:
        """Remove months without rows; a table without any row keeps one file, for its columns."""
        files = sorted(target.glob("*.parquet"))
        empty = [file for file in files if pq.read_metadata(file).num_rows == 0]
        for file in empty if len(empty) < len(files) else empty[1:]:
            file.unlink()


def count_rows(
    tables: FeatureTables,
    name: str,
    window: TimeWindow,
    config: FeatureConfig,
    store: ArtifactStore,
) -> int:
    """Rows of a published raw table whose time lies in the window; 0 before the first refresh.

    Raises:
        ConfigurationError: there is no such table with a time column.
        ArtifactError: its files are gone.
    """
    column = next((t.time_column for t in config.raw_tables if t.name == name), None)
    if column is None:
        raise errors.ConfigurationError(
            f"{name!r} is no raw table with a time column, so its rows cannot be placed in a "
            "window; expected one of the use case's raw tables. Nothing was counted"
        )
    published = next((table for table in tables.raw if table.name == name), None)
    if published is None:
        return 0
    folder = store.path(published.artifact, verify=False)
    query = f"SELECT count(*) FROM {parquet(folder)} WHERE {inside(column, window)}"
    with duckdb_session(store.root) as con:
        found = con.execute(query).fetchall()
    return int(found[0][0])
