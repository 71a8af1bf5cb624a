"""Feast's Spark offline store for the same definitions: Parquet tables by name, nothing lost.

A plug-in by Feast's own extension point: name it as `offline_store.type`. Imported only by a
profile that names it: it needs pyspark, which is not among this project's packages (see
`infra/cluster/requirements.in`). Against Feast's own store:

- file sources of the definitions are read from `tables_path`, or where state has a location, by
  content from there, so they need not change;
- every entity row comes out once, or nothing does;
- types survive: Feast goes through pandas, which has no null for a number;
- the session is in UTC, whatever Spark was started with, since Feast writes moments without a zone.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from feast.data_source import DataSource
from feast.feature_view import FeatureView
from feast.infra.offline_stores.contrib.spark_offline_store.spark import (
    SparkOfflineStore,
    SparkOfflineStoreConfig,
    SparkRetrievalJob,
)
from feast.infra.offline_stores.contrib.spark_offline_store.spark_source import SparkSource
from feast.infra.offline_stores.file_source import FileSource
from feast.repo_config import RepoConfig

from tasks.features.offline.spark_tables import SparkTables, started
from tasks.kernel.errors import FeatureStoreError
from tasks.kernel.files import replacing, scratch_folder
from tasks.kernel.settings import Settings

READ_PARQUET = re.compile(r"read_parquet\('([^'`]+)'\)")


class GuardedSparkOfflineStoreConfig(SparkOfflineStoreConfig):
    """Settings in `feature_store.yaml`."""

    type: str = "tasks.features.offline.spark_store.GuardedSparkOfflineStore"
    tables_path: str
    """Folder of the feature tables, on a disk that all of Spark sees; see `spark_tables`."""


class GuardedSparkOfflineStore(SparkOfflineStore):
    """See the module's docstring."""

    @staticmethod
    def get_historical_features(
        config: RepoConfig,
        feature_views: list[FeatureView],
        feature_refs: list[str],
        entity_df: pd.DataFrame | str,
        *arguments: Any,
        **options: Any,
    ) -> GuardedSparkJob:
        """Point-in-time join of `entity_df` (a frame, or SQL that Spark understands)."""
        if isinstance(entity_df, str):
            tables = _tables(config)
            for file in READ_PARQUET.findall(entity_df):
                tables.read("entity_rows", Path(file))
            entity_df = READ_PARQUET.sub("entity_rows", entity_df)
            num_rows = tables.session.sql(f"SELECT count(*) FROM ({entity_df})").collect()[0][0]
        else:
            num_rows = len(entity_df)
        job = SparkOfflineStore.get_historical_features(
            config,
            [_on_spark(view, config) for view in feature_views],
            [re.sub(r"@v\d+:", ":", ref) for ref in feature_refs],
            entity_df,
            *arguments,
            **options,
        )
        return GuardedSparkJob.of(job, num_rows)

    @staticmethod
    def pull_latest_from_table_or_query(
        config: RepoConfig, data_source: DataSource, *arguments: Any, **options: Any
    ) -> GuardedSparkJob:
        """Newest row of every key with an event time in [start_date, end_date]."""
        pull = SparkOfflineStore.pull_latest_from_table_or_query
        source = _source_on_spark(data_source, config)
        return GuardedSparkJob.of(pull(config, source, *arguments, **options), None)

    @staticmethod
    def pull_all_from_table_or_query(
        config: RepoConfig, data_source: DataSource, *arguments: Any, **options: Any
    ) -> GuardedSparkJob:
        """All rows with an event time in [start_date, end_date]; an open end where None."""
        pull = SparkOfflineStore.pull_all_from_table_or_query
        source = _source_on_spark(data_source, config)
        return GuardedSparkJob.of(pull(config, source, *arguments, **options), None)


class GuardedSparkJob(SparkRetrievalJob):
    """A Spark query whose result has as many rows as were asked for."""

    num_rows: int | None
    """Entity rows, each of which must come out once; None for a plain read."""

    @classmethod
    def of(cls, job: SparkRetrievalJob, num_rows: int | None) -> GuardedSparkJob:
        """The job with its guard."""
        guarded = cls(
            spark_session=job.spark_session,
            query=job.query,
            full_feature_names=job.full_feature_names,
            config=job._config,
            on_demand_feature_views=job.on_demand_feature_views,
            metadata=job.metadata,
        )
        guarded.num_rows = num_rows
        return guarded

    def to_sql(self) -> str:
        """The statements, parted by Feast's own mark; they read views of their session."""
        return str(self.query)

    @contextmanager
    def open_batches(
        self, batch_rows: int, order: Sequence[str] = ()
    ) -> Iterator[pa.RecordBatchReader]:
        """Read the result in batches, one partition of Spark's after the other; sorted by `order`.

        Raises:
            FeatureStoreError: rows were lost or doubled. Nothing was handed out.
        """
        rows, tables = self.to_spark_df(), _tables(self._config)
        rows = rows.sort(*order) if order else rows
        with scratch_folder(".spark", tables.scratch) as scratch:
            tables.bring(rows, scratch / "rows")
            parts = [pq.ParquetFile(part) for part in sorted((scratch / "rows").glob("*.parquet"))]
            self._check_complete(sum(part.metadata.num_rows for part in parts))
            batches = (batch for part in parts for batch in part.iter_batches(batch_rows))
            yield pa.RecordBatchReader.from_batches(parts[0].schema_arrow, batches)

    def write_parquet(self, target: Path, order: list[str], row_group_rows: int) -> None:
        """Write the result to one local Parquet file, sorted by `order`; whole or not at all."""
        with self.open_batches(row_group_rows, order) as rows, replacing(target) as file:
            with pq.ParquetWriter(
                file, rows.schema.remove_metadata(), compression="zstd"
            ) as writer:
                for batch in rows:
                    writer.write_batch(batch)

    def _to_arrow_internal(self, timeout: int | None = None) -> pa.Table:
        table = self.to_spark_df().toArrow()
        self._check_complete(table.num_rows)
        return table

    def _check_complete(self, came: int) -> None:
        if self.num_rows is not None and came != self.num_rows:
            raise FeatureStoreError(
                f"Spark gave {came:,} rows for {self.num_rows:,} entity rows; expected as many. "
                "Nothing was handed out"
            )

    def _to_df_internal(self, timeout: int | None = None) -> pd.DataFrame:
        frame: pd.DataFrame = self._to_arrow_internal(timeout).to_pandas()
        return frame


def _tables(config: RepoConfig) -> SparkTables:
    settings = Settings.from_environment()
    session = started(config.offline_store.spark_conf or {})
    return SparkTables(session, settings.location, settings.home)


def _on_spark(view: FeatureView, config: RepoConfig) -> FeatureView:
    moved = copy.copy(view)
    moved.batch_source = _source_on_spark(view.batch_source, config)
    moved.projection = copy.copy(view.projection)
    moved.projection.version_tag = None  # Feast would write `weather@v0` into Spark's SQL unquoted
    return moved


def _source_on_spark(source: DataSource, config: RepoConfig) -> DataSource:
    """A file source as Spark reads it; a source of Spark's own stays as it is."""
    if not isinstance(source, FileSource):
        return source
    view = "source_" + re.sub(r"\W", "_", source.name)
    _tables(config).read(view, Path(config.offline_store.tables_path) / source.path)
    return SparkSource(
        name=source.name,
        table=view,
        timestamp_field=source.timestamp_field,
        created_timestamp_column=source.created_timestamp_column,
        field_mapping=dict(source.field_mapping),
    )
