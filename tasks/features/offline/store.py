"""Feast offline store that answers point-in-time joins by an as-of merge.

A plug-in by Feast's own extension point: name it as `offline_store.type`. Feast's DuckDB store
joins every entity row with all earlier rows of its key and then keeps the newest; an as-of merge
finds the newest directly (`join.py`), so time and memory no longer grow with history or TTL.
Results are equal, row for row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from feast.infra.offline_stores.offline_store import RetrievalJob
from feast.infra.registry.base_registry import BaseRegistry
from feast.on_demand_feature_view import OnDemandFeatureView
from feast.repo_config import RepoConfig
from pydantic import Field, PositiveInt

from tasks.features.offline.duck import duckdb_session, first_line
from tasks.features.offline.entities import ROW, EntityRows, NaiveTimes, check_names, load_entities
from tasks.features.offline.job import BATCH_ROWS, AsofRetrievalJob, Rows
from tasks.features.offline.join import ViewJoin
from tasks.features.offline.source import as_arrow, damage_explained, moment, scan
from tasks.kernel.errors import ConfigurationError, FeatureStoreError, StorageError
from tasks.kernel.values import in_utc

if TYPE_CHECKING:
    import polars as pl


class AsofDuckDBOfflineStoreConfig(DuckDBOfflineStoreConfig):
    """Settings in `feature_store.yaml`."""

    type: str = "tasks.features.offline.store.AsofDuckDBOfflineStore"
    tables_path: str | None = None
    """Folder in which relative paths of file sources are found; may be a link to a version. The
    feature repository where it is not given."""
    spill_path: str | None = None
    """Folder for what does not fit the memory limit; the system's where not given."""
    memory_limit_mb: PositiveInt = Field(default=3000, description="DuckDB may hold this much.")
    threads: PositiveInt = Field(default=2, description="DuckDB threads.")
    naive_times: NaiveTimes = "utc"
    """What a time without a time zone in an entity frame is: `utc` as everywhere in Feast, or an
    error (`refuse`), which needs `coerce_tz_aware: false` beside it."""


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
        **_: Any,
    ) -> RetrievalJob:
        """Point-in-time join of entity rows with the views' sources.

        Every entity row comes out once, in no stated order.

        Args:
            entity_df: a frame, or DuckDB SQL.
            filter_by_created_timestamp: leave out values that were created after the moment.

        Raises:
            ConfigurationError: naive times are to be refused, but Feast hides them.
            FeatureStoreError: there is no entity frame, or a view lacks its keys; all else is
                raised when the job runs.
        """
        refused = config.offline_store.naive_times == "refuse"
        if refused and config.coerce_tz_aware and isinstance(entity_df, pd.DataFrame):
            raise ConfigurationError(
                "the offline store is to refuse times without a time zone, but Feast makes them "
                "UTC before it sees them; set coerce_tz_aware: false in feature_store.yaml"
            )
        if not feature_views or entity_df is None:
            raise FeatureStoreError(
                "a retrieval needs a feature view and an entity frame, which says for whom and for "
                "which moments; give both. Nothing was retrieved"
            )
        retrieval = _Retrieval(
            config=config,
            joins=[ViewJoin.of(view, feature_refs, full_feature_names) for view in feature_views],
            given=entity_df,
            cut_off=filter_by_created_timestamp,
        )
        on_demand = OnDemandFeatureView.get_requested_odfvs(feature_refs, project, registry)
        return AsofRetrievalJob(
            config, retrieval.read, retrieval.text, on_demand, full_feature_names
        )

    @staticmethod
    def pull_latest_from_table_or_query(
        config: RepoConfig, data_source: DataSource, *arguments: Any, **options: Any
    ) -> RetrievalJob:
        """Newest row of every key with an event time in [start_date, end_date].

        Among rows equal in key and event time the one created last wins, one without a creation
        time being the oldest; among those equal in all, the last of the source. A null key is a key
        like any other. No named feature means all columns.
        """
        return _Pull(config, data_source, *arguments, **options).job(newest=True)

    @staticmethod
    def pull_all_from_table_or_query(
        config: RepoConfig, data_source: DataSource, *arguments: Any, **options: Any
    ) -> RetrievalJob:
        """All rows with an event time in [start_date, end_date]; an open end where None.

        No named feature means all columns.
        """
        return _Pull(config, data_source, *arguments, **options).job()

    @staticmethod
    def offline_write_batch(
        config: RepoConfig, feature_view: FeatureView, *arguments: Any, **options: Any
    ) -> None:
        """Refuse: feature tables are published as a whole.

        Raises:
            FeatureStoreError: always.
        """
        raise FeatureStoreError(
            f"the source of feature view {feature_view.name} cannot be appended to: feature tables "
            "are published as a whole. Bring new rows in by the feature refresh. Nothing was "
            "written"
        )


@dataclass(frozen=True)
class _Retrieval:
    """What one historical retrieval is asked for."""

    config: RepoConfig
    joins: list[ViewJoin]
    given: pd.DataFrame | str
    cut_off: bool

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
                yield load_entities(con, self.given, store.naive_times)
            except duckdb.OutOfMemoryException as exc:
                raise StorageError(
                    f"a retrieval needs more than {store.memory_limit_mb} MB and the space to "
                    f"spill ({first_line(exc)}); raise memory_limit_mb of the offline store or "
                    "free disk space. Nothing is visible of the result"
                ) from exc

    @property
    def text(self) -> str:
        """The query of the entity rows, and in words what is joined to them."""
        given = self.given
        if isinstance(given, pd.DataFrame):
            given = f"-- a frame of {', '.join(map(str, given.columns))}"
        return "\n".join([given, *(join.text for join in self.joins)])


@dataclass(frozen=True)
class _Pull:
    """Rows of one source between two moments, both included; an open end where None.

    Fields are the arguments of Feast's own interface, in its order.
    """

    config: RepoConfig
    data_source: DataSource
    join_key_columns: list[str]
    feature_name_columns: list[str]
    timestamp_field: str
    created_timestamp_column: str | None = None
    start_date: datetime | None = None
    end_date: datetime | None = None

    def job(self, newest: bool = False) -> AsofRetrievalJob:
        """Read the columns, each once; all of the source without features."""

        @contextmanager
        def read(order: Sequence[str]) -> Iterator[Rows]:
            rows = self._rows(newest)
            with damage_explained(self.data_source):
                yield Rows(_batches(rows.sort(order) if order else rows))

        what = "newest row by " + ", ".join(self.join_key_columns) if newest else "rows"
        text = f"-- {what} of {self.data_source.name} in [{self.start_date} .. {self.end_date}]"
        return AsofRetrievalJob(self.config, read, text)

    def _rows(self, newest: bool) -> pl.LazyFrame:
        import polars as pl

        keys, features = self.join_key_columns, self.feature_name_columns
        with damage_explained(self.data_source):
            rows = scan(self.data_source, self.config)
            kinds = rows.collect_schema()
        times = [time for time in (self.timestamp_field, self.created_timestamp_column) if time]
        asked = list(dict.fromkeys([*keys, *features, *times])) if features else kinds.names()
        spelled = {c.casefold(): c for c in kinds}
        if missing := [c for c in asked if c.casefold() not in spelled]:
            raise FeatureStoreError(
                f"source {self.data_source.name} has no column {', '.join(missing)}; it has "
                f"{', '.join(kinds.names())}"
            )
        time = spelled[self.timestamp_field.casefold()]
        at = moment(time, kinds[time])
        if self.start_date is not None:
            rows = rows.filter(at >= in_utc(self.start_date))
        if self.end_date is not None:
            rows = rows.filter(at <= in_utc(self.end_date))
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
