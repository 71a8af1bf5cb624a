"""Feast offline store that answers point-in-time joins with DuckDB's ASOF join.

A plug-in by Feast's own extension point: name it as `offline_store.type`. Feast's DuckDB store
joins every entity row with all earlier rows of its key and then keeps the newest; an ASOF join
finds the newest directly, so time and memory no longer grow with history or TTL. Results are equal,
row for row.

`created` as a cut-off: a row is available from `greatest(event time, created)` on. Among the rows
available at a moment the one with the latest event time wins, so only rows that are the latest when
they become available can ever be chosen; after dropping the others, one inequality on the available
time is enough for ASOF.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
from feast.data_source import DataSource
from feast.feature_view import DUMMY_ENTITY_ID, DUMMY_ENTITY_NAME, FeatureView
from feast.infra.offline_stores.duckdb import DuckDBOfflineStore, DuckDBOfflineStoreConfig
from feast.infra.offline_stores.file_source import FileSource, SavedDatasetFileStorage
from feast.infra.offline_stores.offline_store import RetrievalJob, RetrievalMetadata
from feast.infra.registry.base_registry import BaseRegistry
from feast.on_demand_feature_view import OnDemandFeatureView
from feast.repo_config import RepoConfig
from feast.saved_dataset import SavedDatasetStorage

from tasks.errors import FeatureStoreError
from tasks.features.duck import duckdb_session, names, parquet, sql_name, sql_text

ENTITY_TIME = "event_timestamp"
ROW = "__row"


class AsofDuckDBOfflineStoreConfig(DuckDBOfflineStoreConfig):
    """Settings in `feature_store.yaml`."""

    type: str = "tasks.features.asof_store.AsofDuckDBOfflineStore"
    tables_path: str
    """Folder in which relative paths of file sources are found; may be a link to a version."""
    spill_path: str
    """Folder for what does not fit the memory limit."""
    memory_limit_mb: int = 3000
    threads: int = 2


class AsofDuckDBOfflineStore(DuckDBOfflineStore):
    """Historical retrieval and materialization reads over Parquet, see the module's docstring."""

    supports_filter_by_created_timestamp = True

    @staticmethod
    def get_historical_features(
        config: RepoConfig,
        feature_views: list[FeatureView],
        feature_refs: list[str],
        entity_df: pd.DataFrame | str,
        registry: BaseRegistry,
        project: str,
        full_feature_names: bool = False,
        filter_by_created_timestamp: bool = False,
    ) -> RetrievalJob:
        """Point-in-time join of `entity_df` (a frame, or DuckDB SQL) with the views' sources.

        Every entity row comes out once, in no stated order. Naive times count as UTC.
        """
        joins = [
            _ViewJoin.of(view, feature_refs, full_feature_names, config) for view in feature_views
        ]
        features = OnDemandFeatureView.get_requested_odfvs(feature_refs, project, registry)
        columns = list(entity_df.columns) if isinstance(entity_df, pd.DataFrame) else []
        return AsofRetrievalJob(
            config=config,
            entities=entity_df,
            query=lambda con, present: _join_query(
                con, joins, present, filter_by_created_timestamp
            ),
            on_demand=features,
            full_names=full_feature_names,
            described=RetrievalMetadata(
                features=feature_refs, keys=[c for c in columns if c != ENTITY_TIME]
            ),
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
        """Newest row of every key with an event time in [start_date, end_date]."""
        order = [timestamp_field, *([created_timestamp_column] if created_timestamp_column else [])]
        selected = [*join_key_columns, *feature_name_columns, *order]
        newest = ", ".join(f"{sql_name(c)} DESC" for c in order)
        ranked = f"row_number() OVER (PARTITION BY {names(join_key_columns)} ORDER BY {newest})"
        return _source_job(
            config,
            f"SELECT {names(selected)} FROM {_relation(data_source, config)} "
            f"WHERE {_between(timestamp_field, start_date, end_date)} QUALIFY {ranked} = 1",
        )

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
        """All rows with an event time in [start_date, end_date]; an open end where None."""
        selected = [*join_key_columns, *feature_name_columns, timestamp_field]
        if created_timestamp_column:
            selected.append(created_timestamp_column)
        return _source_job(
            config,
            f"SELECT {names(selected)} FROM {_relation(data_source, config)} "
            f"WHERE {_between(timestamp_field, start_date, end_date)}",
        )


@dataclass
class AsofRetrievalJob(RetrievalJob):
    """A query that runs when its result is asked for, in a database of its own."""

    config: RepoConfig
    entities: pd.DataFrame | str | None
    query: Callable[[duckdb.DuckDBPyConnection, dict[str, str]], str]
    on_demand: list[OnDemandFeatureView]
    full_names: bool
    described: RetrievalMetadata | None = None

    @property
    def full_feature_names(self) -> bool:
        """Whether features are named `<view>__<feature>`."""
        return self.full_names

    @property
    def on_demand_feature_views(self) -> list[OnDemandFeatureView]:
        """Views that Feast computes from the result."""
        return self.on_demand

    @property
    def metadata(self) -> RetrievalMetadata | None:
        """What was asked for."""
        return self.described

    def to_sql(self) -> str:
        """The query, for an entity frame that is SQL."""
        with self._session() as con:
            return self._prepare(con)

    def write_parquet(self, target: Path, order: list[str], row_group_rows: int) -> None:
        """Stream the result into one Parquet file, sorted by `order`; no row becomes Python."""
        with self._session() as con:
            con.execute(
                f"COPY (SELECT * FROM ({self._prepare(con)}) ORDER BY {names(order)}) "
                f"TO {sql_text(target)} (FORMAT parquet, COMPRESSION zstd, "
                f"ROW_GROUP_SIZE {row_group_rows})"
            )

    def persist(
        self,
        storage: SavedDatasetStorage,
        allow_overwrite: bool = False,
        timeout: int | None = None,
    ) -> None:
        """Stream the result to a saved dataset's file."""
        if not isinstance(storage, SavedDatasetFileStorage):
            raise FeatureStoreError(
                f"a result of this store goes to a Parquet file, not to {type(storage).__name__}"
            )
        target = Path(storage.file_options.uri)
        if target.exists() and not allow_overwrite:
            raise FeatureStoreError(f"saved dataset {target} exists; allow overwriting or move it")
        aside = target.with_name(f".{target.name}.part")
        with self._session() as con:
            con.execute(f"COPY ({self._prepare(con)}) TO {sql_text(aside)} (FORMAT parquet)")
        aside.replace(target)

    def _to_df_internal(self, timeout: int | None = None) -> pd.DataFrame:
        frame: pd.DataFrame = self._to_arrow_internal(timeout).to_pandas()
        return frame

    def _to_arrow_internal(self, timeout: int | None = None) -> pa.Table:
        with self._session() as con:
            return con.sql(self._prepare(con)).to_arrow_table()

    def _session(self) -> Any:
        store = self.config.offline_store
        return duckdb_session(
            Path(store.spill_path), memory_limit_mb=store.memory_limit_mb, threads=store.threads
        )

    def _prepare(self, con: duckdb.DuckDBPyConnection) -> str:
        """Make the entity rows readable as `entities`; return the query over them."""
        if self.entities is None:
            return self.query(con, {})
        if isinstance(self.entities, pd.DataFrame):
            con.register("given", self.entities)
            given = "SELECT * FROM given"
        else:
            given = self.entities
        described = con.execute(f"DESCRIBE {given}").fetchall()
        present = {row[0]: row[1] for row in described}
        _check_entities(present)
        con.execute(
            f"CREATE TEMP TABLE entities AS SELECT * REPLACE "
            f"({sql_name(ENTITY_TIME)}::TIMESTAMPTZ AS {sql_name(ENTITY_TIME)}), "
            f"row_number() OVER () AS {ROW} FROM ({given})"
        )
        return self.query(con, present)


@dataclass(frozen=True)
class _ViewJoin:
    """One feature view's part of the join."""

    name: str
    relation: str
    keys: dict[str, str]  # column of the source -> column of the entity frame
    features: dict[str, str]  # column of the source -> name in the result
    event_time: str
    created: str | None
    ttl: timedelta | None

    @classmethod
    def of(
        cls, view: FeatureView, refs: list[str], full_names: bool, config: RepoConfig
    ) -> _ViewJoin:
        source = view.batch_source
        asked = view.projection.name_to_use()
        prefix = view.projection.name_alias or view.name
        columns = {new: old for old, new in source.field_mapping.items()}
        wanted = [ref.split(":", 1)[1] for ref in refs if ref.split(":", 1)[0] == asked]
        keys = [c.name for c in view.entity_columns if c.name != DUMMY_ENTITY_ID]
        if not keys and view.entities != [DUMMY_ENTITY_NAME]:  # would match every row with any
            raise FeatureStoreError(
                f"feature view {view.name} has entities but no key columns; apply it first"
            )
        return cls(
            name=asked,
            relation=_relation(source, config),
            keys={columns.get(k, k): view.projection.join_key_map.get(k, k) for k in keys},
            features={columns.get(f, f): f"{prefix}__{f}" if full_names else f for f in wanted},
            event_time=source.timestamp_field,
            created=source.created_timestamp_column or None,
            ttl=view.ttl or None,
        )

    def right_side(self, con: duckdb.DuckDBPyConnection, cut_off: bool) -> str:
        """Rows that can be chosen, one for each key and available time."""
        keys = names(list(self.keys))
        # Files written by pandas have nanoseconds, a type of its own in DuckDB.
        event = f"{sql_name(self.event_time)}::TIMESTAMPTZ"
        created = f"{sql_name(self.created)}::TIMESTAMPTZ" if self.created else event
        available = f"greatest({event}, {created})" if cut_off and self.created else event
        earliest = f"- INTERVAL {int(self.ttl.total_seconds())} SECONDS" if self.ttl else None
        lower = f"AND {event} >= (SELECT min({ENTITY_TIME}) FROM entities) {earliest}"
        partition = f"PARTITION BY {keys} " if self.keys else ""
        rows = (
            f"SELECT {''.join(f'{sql_name(c)}, ' for c in [*self.keys, *self.features])}"
            f"{event} AS __event, {created} AS __created,"
            f" {available} AS __available FROM {self.relation}"
            f" WHERE {event} <= (SELECT max({ENTITY_TIME}) FROM entities)"
            f" {lower if earliest else ''}"
        )
        if self._has_constant_lag(con):
            return rows
        # The first step drops rows that are older than one already available, the second all but
        # the newest of those that become available together.
        newest = "max({'e': __event, 'c': __created})"
        return (
            f"SELECT * FROM (SELECT * FROM ({rows}) QUALIFY {newest} OVER ({partition}"
            "ORDER BY __available, __event, __created) = {'e': __event, 'c': __created}) "
            f"QUALIFY lead(__available) OVER ({partition}ORDER BY __available, __event, __created) "
            "IS DISTINCT FROM __available"
        )

    def _has_constant_lag(self, con: duckdb.DuckDBPyConnection) -> bool:
        """True where every row is created equally long after its event.

        Rows then become available in the order of their events, so none is ever passed over; what
        could still tie is equal in both times, and has no defined winner.
        """
        if not self.created:
            return True
        lag = f"{sql_name(self.created)}::TIMESTAMPTZ - {sql_name(self.event_time)}::TIMESTAMPTZ"
        return bool(
            con.execute(
                f"SELECT coalesce(min({lag}) = max({lag}), true) FROM {self.relation}"
            ).fetchall()[0][0]
        )


def _join_query(
    con: duckdb.DuckDBPyConnection,
    joins: list[_ViewJoin],
    present: dict[str, str],
    cut_off: bool,
) -> str:
    """One ASOF join a view; an expired row (older than the TTL, edge included) becomes null."""
    selected = [f"e.{sql_name(c)}" for c in present]
    clauses = ["FROM entities AS e"]
    for number, join in enumerate(joins):
        side = f"v{number}"
        if missing := [k for k in join.keys.values() if k not in present]:
            raise FeatureStoreError(
                f"feature view {join.name} needs column(s) {', '.join(missing)}, which the entity "
                f"frame lacks; it has {', '.join(present)}"
            )
        fresh = "true"
        if join.ttl:
            seconds = int(join.ttl.total_seconds())
            fresh = f"{side}.__event >= e.{ENTITY_TIME} - INTERVAL {seconds} SECONDS"
        selected += [
            f"CASE WHEN {fresh} THEN {side}.{sql_name(column)} END AS {sql_name(name)}"
            for column, name in join.features.items()
        ]
        equal = [f"e.{sql_name(e)} = {side}.{sql_name(k)}" for k, e in join.keys.items()]
        on = " AND ".join([*equal, f"e.{ENTITY_TIME} >= {side}.__available"])
        clauses.append(f"ASOF LEFT JOIN ({join.right_side(con, cut_off)}) AS {side} ON {on}")
    return f"SELECT {', '.join(selected)} {' '.join(clauses)}"


def _check_entities(present: dict[str, str]) -> None:
    if ENTITY_TIME not in present:
        raise FeatureStoreError(
            f"the entity frame has no column {ENTITY_TIME}; it has {', '.join(present)}"
        )
    kind = present[ENTITY_TIME]
    if not re.match(r"TIMESTAMP|DATE|VARCHAR", kind):
        raise FeatureStoreError(f"{ENTITY_TIME} of the entity frame is {kind}, expected a time")


def _relation(source: DataSource, config: RepoConfig) -> str:
    if not isinstance(source, FileSource):
        raise FeatureStoreError(
            f"source {source.name} is a {type(source).__name__}; this store reads Parquet files"
        )
    if "://" in source.path:
        return f"read_parquet({sql_text(source.path)})"
    path = (Path(config.offline_store.tables_path) / source.path).resolve()
    if not path.exists():
        raise FeatureStoreError(
            f"feature table {source.path} is not there yet; run the feature refresh for a window "
            "first"
        )
    return parquet(path)


def _between(column: str, start: datetime | None, end: datetime | None) -> str:
    moment = f"{sql_name(column)}::TIMESTAMPTZ"
    bounds = [
        f"{moment} {sign} {sql_text(_utc(bound).isoformat())}::TIMESTAMPTZ"
        for sign, bound in ((">=", start), ("<=", end))
        if bound is not None
    ]
    return " AND ".join(bounds) or "true"


def _utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _source_job(config: RepoConfig, query: str) -> AsofRetrievalJob:
    return AsofRetrievalJob(
        config=config, entities=None, query=lambda *_: query, on_demand=[], full_names=False
    )
