"""Feast offline store that answers point-in-time joins by an as-of merge.

A plug-in by Feast's own extension point: name it as `offline_store.type`. Feast's DuckDB store
joins every entity row with all earlier rows of its key and then keeps the newest; an as-of merge
finds the newest directly (`join.py`), so time and memory no longer grow with history or TTL.
Results are equal, row for row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
from feast.data_source import DataSource
from feast.feature_view import FeatureView
from feast.infra.offline_stores.duckdb import DuckDBOfflineStore, DuckDBOfflineStoreConfig
from feast.infra.offline_stores.file_source import FileSource
from feast.infra.offline_stores.offline_store import RetrievalJob, RetrievalMetadata
from feast.infra.registry.base_registry import BaseRegistry
from feast.on_demand_feature_view import OnDemandFeatureView
from feast.repo_config import RepoConfig
from feast.utils import compute_non_entity_date_range
from pydantic import Field, PositiveInt

from tasks.features.offline.duck import names, sql_name
from tasks.features.offline.entities import (
    EntityRows,
    NaiveTimes,
    Script,
    key_columns,
    load_entities,
    seen_between,
)
from tasks.features.offline.job import AsofRetrievalJob, Query
from tasks.features.offline.join import ViewJoin, join_views
from tasks.features.offline.push import append_rows
from tasks.features.offline.source import between, local_path, located, relation
from tasks.kernel.errors import ConfigurationError, FeatureStoreError, WindowError

__all__ = ["AsofDuckDBOfflineStore", "AsofDuckDBOfflineStoreConfig", "AsofRetrievalJob"]


class AsofDuckDBOfflineStoreConfig(DuckDBOfflineStoreConfig):
    """Settings in `feature_store.yaml`."""

    type: str = "tasks.features.offline.store.AsofDuckDBOfflineStore"
    tables_path: str | None = Field(
        default=None,
        description="Folder in which relative paths of file sources are found; may be a link to a "
        "version. The feature repository where it is not given.",
    )
    spill_path: str | None = Field(
        default=None,
        description="Folder for what does not fit the memory limit; the system's where not given.",
    )
    memory_limit_mb: PositiveInt = Field(default=3000, description="DuckDB may hold this much.")
    threads: PositiveInt = Field(default=2, description="DuckDB threads.")
    naive_times: NaiveTimes = Field(
        default="utc",
        description="What a time without a time zone in an entity frame is: `utc` as everywhere in "
        "Feast, or an error (`refuse`), which needs `coerce_tz_aware: false` beside it.",
    )


class AsofDuckDBOfflineStore(DuckDBOfflineStore):
    """Historical retrieval and materialization reads over Parquet, see the module's docstring."""

    supports_filter_by_created_timestamp = True

    @staticmethod
    def get_historical_features(
        config: RepoConfig,
        feature_views: list[FeatureView],
        feature_refs: list[str],
        entity_df: pd.DataFrame | str | None,
        registry: BaseRegistry,
        project: str,
        full_feature_names: bool = False,
        filter_by_created_timestamp: bool = False,
        start_date: datetime | None = None,
        end_date: datetime | None = None,
    ) -> RetrievalJob:
        """Point-in-time join of entity rows with the views' sources.

        Every entity row comes out once, in no stated order.

        Without an entity frame the entity rows are those that the views themselves have seen: every
        distinct combination of keys and event time in the views' sources in [start_date, end_date],
        with all views as known at that moment, as in Feast's Ray, Oracle and (for views of equal
        keys) PostgreSQL stores. Keys that a view lacks are null in the rows it adds. Dates default
        as Feast says: until now, from the longest TTL (or 30 days) before.

        Args:
            entity_df: a frame, DuckDB SQL, or None.
            filter_by_created_timestamp: leave out values that were created after the moment.
            start_date: first event time; counts as UTC where it has no time zone, as `end_date`.

        Raises:
            ConfigurationError: naive times are to be refused, but Feast hides them.
            WindowError: the dates are reversed.
            FeatureStoreError: a view lacks its keys; all else is said when the job runs.
        """
        _check_naive_times(config, entity_df)
        if not feature_views:
            raise FeatureStoreError("a retrieval names no feature view; ask for at least one")
        retrieval = _Retrieval(
            config=config,
            joins=[ViewJoin.of(view, feature_refs, full_feature_names) for view in feature_views],
            given=entity_df
            if entity_df is not None
            else _range_of(feature_views, start_date, end_date),
            cut_off=filter_by_created_timestamp,
            refs=feature_refs,
        )
        job = AsofRetrievalJob(
            config=config,
            prepare=retrieval.prepare,
            on_demand=OnDemandFeatureView.get_requested_odfvs(feature_refs, project, registry),
            full_names=full_feature_names,
        )
        job.describe = lambda: retrieval.describe(job)
        return job

    @staticmethod
    def pull_latest_from_table_or_query(
        config: RepoConfig,
        data_source: DataSource,
        join_key_columns: list[str],
        feature_name_columns: list[str],
        timestamp_field: str,
        created_timestamp_column: str | None,
        start_date: datetime,
        end_date: datetime,
    ) -> RetrievalJob:
        """Newest row of every key with an event time in [start_date, end_date].

        Among rows equal in key and event time the one created last wins, one without a creation
        time being the oldest; among those equal in all, the last of the source. A null key is a key
        like any other. No named feature means all columns.
        """
        times = [timestamp_field, *([created_timestamp_column] if created_timestamp_column else [])]
        columns = _columns(join_key_columns, feature_name_columns, times)
        partition = f"PARTITION BY {names(join_key_columns)} " if join_key_columns else ""
        newest = ", ".join(f"{sql_name(c)} DESC NULLS LAST" for c in times)

        def query(con: duckdb.DuckDBPyConnection) -> Query:
            rows = relation(con, data_source, config, start_date, end_date)
            return Query(
                f"SELECT * EXCLUDE (__number) FROM (SELECT {columns}, row_number() OVER () AS "
                f"__number FROM {rows} WHERE {between(timestamp_field, start_date, end_date)}) "
                f"QUALIFY row_number() OVER ({partition}ORDER BY {newest}, __number DESC) = 1"
            )

        return _source_job(config, query)

    @staticmethod
    def pull_all_from_table_or_query(
        config: RepoConfig,
        data_source: DataSource,
        join_key_columns: list[str],
        feature_name_columns: list[str],
        timestamp_field: str,
        created_timestamp_column: str | None = None,
        start_date: datetime | None = None,
        end_date: datetime | None = None,
    ) -> RetrievalJob:
        """All rows with an event time in [start_date, end_date]; an open end where None.

        No named feature means all columns.
        """
        times = [timestamp_field, *([created_timestamp_column] if created_timestamp_column else [])]
        columns = _columns(join_key_columns, feature_name_columns, times)

        def query(con: duckdb.DuckDBPyConnection) -> Query:
            rows = relation(con, data_source, config, start_date, end_date)
            kept = between(timestamp_field, start_date, end_date)
            return Query(f"SELECT {columns} FROM {rows} WHERE {kept}")

        return _source_job(config, query)

    @staticmethod
    def offline_write_batch(
        config: RepoConfig,
        feature_view: FeatureView,
        table: pa.Table,
        progress: Callable[[int], Any] | None,
    ) -> None:
        """Append rows to a view's file, one writer after the other.

        Raises:
            WindowError: a time lies in the future. Others as for `append_rows`.
            FeatureStoreError: the file is on S3 or among the published feature tables, of which a
                new version is made as a whole.
        """
        source = feature_view.batch_source
        path = source.path if isinstance(source, FileSource) else ""
        published = config.offline_store.tables_path and not Path(path).is_absolute()
        if "://" in path or (path and published):
            raise FeatureStoreError(
                f"source {source.name} of feature view {feature_view.name} cannot be appended to: "
                "feature tables are published as a whole. Bring new rows in by the feature "
                "refresh. Nothing was written"
            )
        append_rows(feature_view, local_path(path, config), table)
        if progress:
            progress(table.num_rows)

    @staticmethod
    def compute_monitoring_metrics(
        config: RepoConfig, data_source: DataSource, *arguments: Any, **options: Any
    ) -> list[dict[str, Any]]:
        """Feast's own figures of a source, which may lie under `tables_path`."""
        source = _located(data_source, config)
        found: list[dict[str, Any]] = DuckDBOfflineStore.compute_monitoring_metrics(
            config, source, *arguments, **options
        )
        return found

    @staticmethod
    def get_monitoring_max_timestamp(
        config: RepoConfig, data_source: DataSource, timestamp_field: str
    ) -> datetime | None:
        """Newest event time of a source, which may lie under `tables_path`."""
        source = _located(data_source, config)
        newest: datetime | None = DuckDBOfflineStore.get_monitoring_max_timestamp(
            config, source, timestamp_field
        )
        return newest


@dataclass(frozen=True)
class _Retrieval:
    """What one historical retrieval is asked for."""

    config: RepoConfig
    joins: list[ViewJoin]
    given: pd.DataFrame | str | tuple[datetime, datetime]
    cut_off: bool
    refs: list[str]

    def prepare(self, con: duckdb.DuckDBPyConnection) -> Query:
        """Match the entity rows with every view; return the query over what was found."""
        script = Script(con)
        entities = self.load(script)
        query = join_views(script, self.joins, entities, self.config, self.cut_off)
        return Query(query, entities.num_rows, tuple(script.statements))

    def load(self, script: Script) -> EntityRows:
        """Make the table `entities`."""
        given = self.given
        if isinstance(given, tuple):
            given = seen_between(join.seen(script.con, self.config, *given) for join in self.joins)
        return load_entities(script, given, self.config.offline_store.naive_times)

    def describe(self, job: AsofRetrievalJob) -> RetrievalMetadata:
        """Features, keys and the range of moments, for whoever saves the result."""
        with job._session() as con:
            entities = self.load(Script(con))
            first, last = con.execute(
                f"SELECT min(t), max(t) FROM (SELECT {sql_name(entities.event_time)} AS t "
                "FROM entities)"
            ).fetchall()[0]
        return RetrievalMetadata(
            features=self.refs,
            keys=key_columns(entities),
            min_event_timestamp=first,
            max_event_timestamp=last,
        )


def _located(source: DataSource, config: RepoConfig) -> DataSource:
    return located(source, config) if isinstance(source, FileSource) else source


def _check_naive_times(config: RepoConfig, entity_df: pd.DataFrame | str | None) -> None:
    refused = config.offline_store.naive_times == "refuse"
    if refused and config.coerce_tz_aware and isinstance(entity_df, pd.DataFrame):
        raise ConfigurationError(
            "the offline store is to refuse times without a time zone, but Feast makes them UTC "
            "before it sees them; set coerce_tz_aware: false in feature_store.yaml"
        )


def _range_of(
    views: list[FeatureView], start: datetime | None, end: datetime | None
) -> tuple[datetime, datetime]:
    """First and last event time of a retrieval without an entity frame."""
    first, last = compute_non_entity_date_range(views, start, end)
    if first > last:
        raise WindowError(
            f"retrieval from {first.isoformat()} to {last.isoformat()} is reversed; expected "
            "start_date at or before end_date, which is now where it is not given. Nothing was read"
        )
    return first, last


def _columns(keys: Sequence[str], features: Sequence[str], times: Sequence[str]) -> str:
    """The columns of a source that are asked for, each once; all of them without features."""
    return names(list(dict.fromkeys([*keys, *features, *times]))) if features else "*"


def _source_job(
    config: RepoConfig, query: Callable[[duckdb.DuckDBPyConnection], Query]
) -> AsofRetrievalJob:
    return AsofRetrievalJob(config=config, prepare=query, on_demand=[], full_names=False)
