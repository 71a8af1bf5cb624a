"""Feast offline store that answers point-in-time joins by an as-of merge.

A plug-in by Feast's own extension point: name it as `offline_store.type`. Feast's DuckDB store
joins every entity row with all earlier rows of its key and then keeps the newest; an as-of merge
finds the newest directly (`join.py`), so time and memory no longer grow with history or TTL.
Results are equal, row for row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

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

from tasks.features.offline.duck import duckdb_session, first_line
from tasks.features.offline.entities import (
    EVENT_TIME,
    ROW,
    EntityRows,
    NaiveTimes,
    check_names,
    load_entities,
)
from tasks.features.offline.job import BATCH_ROWS, AsofRetrievalJob, Rows
from tasks.features.offline.join import ViewJoin
from tasks.features.offline.source import (
    as_arrow,
    damage_explained,
    local_path,
    located,
    moment,
    scan,
    utc,
)
from tasks.features.offline.target import append_rows
from tasks.kernel.errors import (
    ConfigurationError,
    FeatureStoreError,
    StorageError,
    WindowError,
)

if TYPE_CHECKING:
    import polars as pl

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
        return AsofRetrievalJob(
            config=config,
            read=retrieval.read,
            text=retrieval.text,
            on_demand=OnDemandFeatureView.get_requested_odfvs(feature_refs, project, registry),
            full_names=full_feature_names,
            describe=retrieval.describe,
        )

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
        pull = _Pull(
            config, data_source, timestamp_field, created_timestamp_column, start_date, end_date
        )
        return pull.job(join_key_columns, feature_name_columns, newest=True)

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
        pull = _Pull(
            config, data_source, timestamp_field, created_timestamp_column, start_date, end_date
        )
        return pull.job(join_key_columns, feature_name_columns)

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

    @contextmanager
    def read(self, order: Sequence[str]) -> Iterator[Rows]:
        """Match the entity rows with every view, block by block."""
        with self._entities() as entities:
            for join in self.joins:
                if missing := [k for k in join.keys.values() if k not in entities.columns]:
                    raise FeatureStoreError(
                        f"feature view {join.name} needs column(s) {', '.join(missing)}, which the "
                        f"entity frame lacks; it has {', '.join(entities.columns)}"
                    )
            outputs = [output for join in self.joins for output in join.features]
            check_names([*entities.columns, *outputs], "the result")
            joined = (self._joined(block, entities.event_time) for block in entities.blocks(order))
            yield Rows(joined, lambda: entities.num_read)

    def _joined(self, block: pa.RecordBatch, moment: str) -> pa.RecordBatch:
        import polars as pl

        keys = {key for join in self.joins for key in join.keys.values()}
        asked = pl.DataFrame(block.select(sorted({*keys, moment}))).with_row_index(ROW).sort(moment)
        place = asked[ROW].arg_sort()  # of each row of the block
        for join in self.joins:
            values = as_arrow(join.values_at(asked, moment, place, self.config, self.cut_off))
            for name in values.schema.names:
                block = block.append_column(name, values[name])
        return block

    @contextmanager
    def _entities(self) -> Iterator[EntityRows]:
        """The entity rows, in a session of their own."""
        store = self.config.offline_store
        spill = Path(store.spill_path or gettempdir())
        with duckdb_session(
            spill, memory_limit_mb=store.memory_limit_mb, threads=store.threads
        ) as con:
            con.execute("SET python_enable_replacements = false")  # a name is a table, no variable
            try:
                yield load_entities(con, self._given(), store.naive_times)
            except duckdb.OutOfMemoryException as exc:
                raise StorageError(
                    f"a retrieval needs more than {store.memory_limit_mb} MB and the space to "
                    f"spill ({first_line(exc)}); raise memory_limit_mb of the offline store or "
                    "free disk space. Nothing is visible of the result"
                ) from exc

    def _given(self) -> pd.DataFrame | pa.Table | str:
        """The entity rows; those that the views have seen where only a range is given."""
        if not isinstance(self.given, tuple):
            return self.given
        import polars as pl

        seen = pl.concat(
            [join.seen(self.config, *self.given) for join in self.joins], how="diagonal_relaxed"
        )
        return seen.unique().select(EVENT_TIME, pl.exclude(EVENT_TIME)).collect().to_arrow()

    @property
    def text(self) -> str:
        """The query of the entity rows, and in words what is joined to them."""
        given = self.given
        if isinstance(given, tuple):
            given = "-- keys and moments of the views in [" + " .. ".join(map(str, given)) + "]"
        elif isinstance(given, pd.DataFrame):
            given = f"-- a frame of {', '.join(map(str, given.columns))}"
        return "\n".join([given, *(join.text for join in self.joins)])

    def describe(self) -> RetrievalMetadata:
        """Features, keys and the range of moments, for whoever saves the result."""
        with self._entities() as entities:
            first, last = entities.span()
        return RetrievalMetadata(
            features=self.refs,
            keys=[column for column in entities.columns if column != entities.event_time],
            min_event_timestamp=first,
            max_event_timestamp=last,
        )


@dataclass(frozen=True)
class _Pull:
    """Rows of one source between two moments, both included; an open end where None."""

    config: RepoConfig
    source: DataSource
    event_time: str
    created: str | None
    start: datetime | None
    end: datetime | None

    def job(
        self, keys: Sequence[str], features: Sequence[str], newest: bool = False
    ) -> AsofRetrievalJob:
        """Read the columns, each once; all of the source without features."""

        @contextmanager
        def read(order: Sequence[str]) -> Iterator[Rows]:
            rows = self._rows(keys, features, newest)
            with damage_explained(self.source):
                yield Rows(_batches(rows.sort(order) if order else rows))

        what = "newest row by " + ", ".join(keys) if newest else "rows"
        text = f"-- {what} of {self.source.name} in [{self.start} .. {self.end}]"
        return AsofRetrievalJob(self.config, read, text, on_demand=[], full_names=False)

    def _rows(self, keys: Sequence[str], features: Sequence[str], newest: bool) -> pl.LazyFrame:
        import polars as pl

        with damage_explained(self.source):
            rows = scan(self.source, self.config)
            kinds = rows.collect_schema()
        times = [self.event_time, *([self.created] if self.created else [])]
        asked = list(dict.fromkeys([*keys, *features, *times])) if features else kinds.names()
        spelled = {c.casefold(): c for c in kinds}
        if missing := [c for c in asked if c.casefold() not in spelled]:
            raise FeatureStoreError(
                f"source {self.source.name} has no column {', '.join(missing)}; it has "
                f"{', '.join(kinds.names())}"
            )
        time = spelled[self.event_time.casefold()]
        at = moment(time, kinds[time])
        if self.start is not None:
            rows = rows.filter(at >= utc(self.start))
        if self.end is not None:
            rows = rows.filter(at <= utc(self.end))
        rows = rows.select(pl.col(spelled[c.casefold()]).alias(c) for c in asked)
        if not newest:
            return rows
        rows = rows.sort(times, nulls_last=False, maintain_order=True)
        return rows.unique(keys, keep="last", maintain_order=True) if keys else rows.tail(1)


def _batches(rows: pl.LazyFrame) -> Iterator[pa.RecordBatch]:
    """The rows as they are computed; an empty batch where there are none."""
    frames = iter(rows.collect_batches(chunk_size=BATCH_ROWS))
    first = next(frames, None)
    yield as_arrow(rows.clear().collect() if first is None else first)
    yield from map(as_arrow, frames)


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
