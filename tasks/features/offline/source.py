"""Sources of the ASOF offline store: Parquet on the disk or on S3, scanned by polars."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

import pyarrow as pa
import pyarrow.dataset as pads
from feast.data_format import ParquetFormat
from feast.data_source import DataSource
from feast.infra.offline_stores.file_source import FileSource
from feast.repo_config import RepoConfig

from tasks.kernel.errors import ArtifactError, FeatureStoreError

if TYPE_CHECKING:  # 40 MB, which only a retrieval needs
    import polars as pl


def scan(source: DataSource, config: RepoConfig) -> pl.LazyFrame:
    """The rows of `source`, of which only the columns and rows that are asked for get read.

    Objects on S3 are read through Arrow; credentials come from the environment alone.

    Raises:
        FeatureStoreError: the source is no Parquet file, or is not there.
    """
    import polars as pl

    if not isinstance(source, FileSource):
        raise FeatureStoreError(
            f"source {source.name} is a {type(source).__name__}; this store reads Parquet files"
        )
    if not isinstance(source.file_format, ParquetFormat | None):
        kind = type(source.file_format).__name__
        raise FeatureStoreError(f"source {source.name} has {kind}; this store reads Parquet files")
    if source.path.startswith("s3://"):
        rows = pl.scan_pyarrow_dataset(_remote_files(source))
    else:
        path = _local_files(source, config)
        rows = pl.scan_parquet(
            path / "*.parquet" if path.is_dir() else path,
            hive_partitioning=False,
            extra_columns="ignore",
        )
    return rows.with_columns(pl.selectors.by_dtype(pl.Categorical, pl.Enum).cast(pl.String))


@contextmanager
def damage_explained(source: DataSource) -> Iterator[None]:
    """Say which source it is that cannot be read.

    Raises:
        ArtifactError: its files are gone or damaged.
    """
    import polars as pl

    try:
        yield
    except (OSError, pl.exceptions.PolarsError, pa.ArrowException) as exc:
        reason = str(exc).split("\n", 1)[0]
        raise ArtifactError(
            f"source {source.name} at {getattr(source, 'path', '')} cannot be read ({reason}): a "
            "file is damaged or gone. Nothing was retrieved; take it from a backup with "
            "`falaj restore`, or run the refresh of its windows again in an empty state folder"
        ) from exc


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


def moment(column: str, kind: pl.DataType, *, known_from: bool = False) -> pl.Expr:
    """A time of a source as a moment in UTC; one without a time zone counts as UTC.

    Microseconds are the finest part. Files written by pandas have nanoseconds: those of a moment
    from which a row is known (`known_from`) are rounded up, so that no row is given before that.

    Raises:
        FeatureStoreError: the column holds no times.
    """
    import polars as pl

    time = pl.col(column)
    if isinstance(kind, pl.Date):
        return time.cast(pl.Datetime("us", "UTC"))
    if not isinstance(kind, pl.Datetime):
        raise FeatureStoreError(f"column {column} of a source is {kind}, expected a time")
    if kind.time_unit == "ns":
        time = (time.to_physical() + (999 if known_from else 0)) // 1000
    if kind != pl.Datetime("us", "UTC"):  # a plain column lets whole row groups be left out
        time = time.cast(pl.Datetime("us", kind.time_zone))
        zone = time.dt.replace_time_zone if kind.time_zone is None else time.dt.convert_time_zone
        time = zone("UTC")
    return time


def as_arrow(rows: pl.DataFrame) -> pa.RecordBatch:
    """The rows in the types that Feast and Parquet's readers give: polars has large ones alone."""
    table = rows.to_arrow()
    schema = pa.schema([(field.name, _usual(field.type)) for field in table.schema])
    batches = table.cast(schema).combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema)


def _usual(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_large_list(kind):
        return pa.list_(_usual(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_usual(kind.key_type), _usual(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _usual(field.type)) for field in kind])
    return kind


def _local_files(source: FileSource, config: RepoConfig) -> Path:
    path = local_path(source.path, config)
    if set("*?[") & set(source.path):
        return path
    if not path.exists():
        present = sorted(p.name for p in path.parent.glob("*")) if path.parent.is_dir() else []
        cure = (
            f"there are {', '.join(present)}. Declare it among feature_tables in use_case.yaml, or "
            f"mend the path of source {source.name} in the feature definitions"
            if present
            else "no feature table is there yet; refresh a window first"
        )
        raise FeatureStoreError(f"feature table {source.path} is not there; {cure}")
    return path.resolve()


def _remote_files(source: FileSource) -> pads.Dataset:
    filesystem, path = FileSource.create_filesystem_and_path(
        source.path, source.s3_endpoint_override
    )
    try:
        return pads.dataset(path, filesystem=filesystem, format="parquet")
    except (OSError, pa.ArrowInvalid) as exc:
        raise FeatureStoreError(
            f"source {source.name} at {source.path} cannot be read ({exc}); expected Parquet, and "
            "credentials in the environment"
        ) from exc
