"""Sources of the ASOF offline store: Parquet on the disk or on S3, as something DuckDB can read."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlparse

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
from feast.data_format import ParquetFormat
from feast.data_source import DataSource
from feast.infra.offline_stores.file_source import FileSource
from feast.repo_config import RepoConfig

from tasks.features.offline.duck import parquet, sql_name, sql_text
from tasks.kernel.errors import FeatureStoreError


def relation(
    con: duckdb.DuckDBPyConnection,
    source: DataSource,
    config: RepoConfig,
    since: datetime | None = None,
    until: datetime | None = None,
) -> str:
    """SQL that reads the rows of `source`.

    Objects on S3 are streamed through Arrow, without those whose event time lies outside `since`
    and `until`, both included; credentials come from the environment alone. For local files the
    bounds say nothing: DuckDB finds them in the query.

    Raises:
        FeatureStoreError: the source is no Parquet file, or is not there.
    """
    if not isinstance(source, FileSource):
        raise FeatureStoreError(
            f"source {source.name} is a {type(source).__name__}; this store reads Parquet files"
        )
    if source.file_format is not None and not isinstance(source.file_format, ParquetFormat):
        kind = type(source.file_format).__name__
        raise FeatureStoreError(f"source {source.name} has {kind}; this store reads Parquet files")
    if source.path.startswith("s3://"):
        con.register(source.path, _remote_rows(source, since, until))
        return sql_name(source.path)
    return _local_rows(source, config)


def source_columns(con: duckdb.DuckDBPyConnection, rows: str) -> dict[str, str]:
    """Columns of a relation and their DuckDB types."""
    return {row[0]: row[1] for row in con.execute(f"DESCRIBE SELECT * FROM {rows}").fetchall()}


def source_name(source: DataSource, name: str, present: Collection[str]) -> str | None:
    """The column of a source that has `name` after its field mapping, as the source spells it."""
    spelled = {column.casefold(): column for column in present}
    mapped = [old for old, new in source.field_mapping.items() if new == name]
    return next((spelled[c.casefold()] for c in [*mapped, name] if c.casefold() in spelled), None)


def local_path(uri: str, config: RepoConfig) -> Path:
    """Where a path of a source lies: relative ones are found under `tables_path`.

    Raises:
        FeatureStoreError: the address is not one of the local disk.
    """
    parsed = urlparse(uri)
    if parsed.scheme not in ("", "file") or (parsed.scheme and parsed.netloc):
        raise FeatureStoreError(
            f"{uri} is no place that this store reads or writes; name a local path or s3://"
        )
    base = config.offline_store.tables_path or config.repo_path or "."
    return Path(base) / (parsed.path if parsed.scheme else uri)


def located(source: FileSource, config: RepoConfig) -> FileSource:
    """The source by its full path, for code of Feast that knows nothing of `tables_path`."""
    if "://" in source.path:
        return source
    path = local_path(source.path, config).resolve()
    return FileSource(
        name=source.name,
        path=str(path / "*.parquet" if path.is_dir() else path),
        file_format=source.file_format or ParquetFormat(),
        timestamp_field=source.timestamp_field,
        created_timestamp_column=source.created_timestamp_column,
        field_mapping=dict(source.field_mapping),
    )


def utc_moment(column: str, kind: str, *, known_from: bool = False) -> str:
    """SQL of a time as a moment in UTC; microseconds are the finest part.

    Files written by pandas have nanoseconds, a type of its own in DuckDB, which a cast rounds: a
    row could be given before it was known. So nanoseconds of a moment that is asked for are cut
    off, and a moment from which a row is known is rounded up.
    """
    if not kind.endswith("_NS"):
        return f"{sql_name(column)}::TIMESTAMPTZ"
    ns = f"(epoch_ns({sql_name(column)}) + {999 if known_from else 0})"
    return f"make_timestamp(({ns} - ({ns} % 1000 + 1000) % 1000) // 1000)::TIMESTAMPTZ"


def between(column: str, start: datetime | None, end: datetime | None) -> str:
    """A condition on a time column, both ends included; an end that is None is open."""
    moment = f"{sql_name(column)}::TIMESTAMPTZ"
    bounds = [
        f"{moment} {sign} {sql_text(utc(bound).isoformat())}::TIMESTAMPTZ"
        for sign, bound in ((">=", start), ("<=", end))
        if bound is not None
    ]
    return " AND ".join(bounds) or "true"


def utc(moment: datetime) -> datetime:
    """The same moment in UTC; one without a time zone counts as UTC, as everywhere in Feast."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _local_rows(source: FileSource, config: RepoConfig) -> str:
    path = local_path(source.path, config)
    if set("*?[") & set(source.path):
        return parquet(path)
    if not path.exists():
        present = sorted(p.name for p in path.parent.glob("*")) if path.parent.is_dir() else []
        cure = (
            f"there are {', '.join(present)}. Declare it among feature_tables in use_case.yaml, or "
            f"mend the path of source {source.name} in the feature definitions"
            if present
            else "no feature table is there yet; refresh a window first"
        )
        raise FeatureStoreError(f"feature table {source.path} is not there; {cure}")
    return parquet(path.resolve())


def _remote_rows(
    source: FileSource, since: datetime | None, until: datetime | None
) -> pads.Dataset:
    filesystem, path = FileSource.create_filesystem_and_path(
        source.path, source.s3_endpoint_override
    )
    try:
        rows = pads.dataset(path, filesystem=filesystem, format="parquet")
    except (OSError, pa.ArrowInvalid) as exc:
        raise FeatureStoreError(
            f"source {source.name} at {source.path} cannot be read ({exc}); expected Parquet, and "
            "credentials in the environment"
        ) from exc
    moment = source_name(source, source.timestamp_field, rows.schema.names)
    if moment is None or not pa.types.is_timestamp(rows.schema.field(moment).type):
        return rows  # the query will say so
    kind = rows.schema.field(moment).type
    field = pc.field(moment)
    if since is not None and (first := _moment(since, kind)) is not None:
        rows = rows.filter(field >= first)
    if until is not None and (last := _moment(until, kind)) is not None:
        rows = rows.filter(field <= last)
    return rows


def _moment(moment: datetime, kind: pa.DataType) -> pa.Scalar | None:
    """A bound in the type of the column, not later than it; None where the type cannot say it.

    A column without a time zone holds UTC.
    """
    there = utc(moment) if kind.tz else utc(moment).replace(tzinfo=None)
    step = {"s": 1_000_000, "ms": 1_000}.get(kind.unit, 1)
    there = there.replace(microsecond=there.microsecond // step * step)
    try:
        return pa.scalar(there, pa.timestamp("us", tz=kind.tz)).cast(kind)
    except pa.ArrowInvalid:  # nanoseconds reach from 1677 to 2262
        return None
