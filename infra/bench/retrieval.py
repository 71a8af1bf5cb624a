"""Historical retrieval through Feast against the same ASOF joins in plain DuckDB, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
from feast import FeatureStore

from flows.config import PipelineConfig
from tasks.features.duck import duckdb_session, names, parquet, set_window, sql_name, sql_text
from tasks.features.store import open_store
from tasks.features.tables import (
    current_tables,
    features_folder,
    read_query,
    register_raw,
)
from tasks.settings import Settings

ROUNDS = 3


def compare_retrieval(config: PipelineConfig, settings: Settings) -> tuple[float, float, int]:
    """Median seconds of both, on all rows of the window, and the rows that differ.

    Returns:
        Seconds through Feast, seconds in plain DuckDB, rows in one result but not in the other.
    """
    tables = current_tables(settings.home)
    folder = features_folder(tables, settings.store)
    feast = open_store(settings.home, settings.feature_repo, folder)
    with TemporaryDirectory(dir=settings.home) as scratch:
        frame, ours, theirs = (Path(scratch) / f"{n}.parquet" for n in ("frame", "feast", "plain"))
        _write_frame(config, settings, frame)
        runs: dict[str, list[float]] = {"feast": [], "plain": []}
        for _ in range(ROUNDS):
            runs["feast"].append(_timed(lambda: _through_feast(feast, config, frame, ours)))
            runs["plain"].append(_timed(lambda: _directly(feast, config, folder, frame, theirs)))
        with duckdb.connect() as con:
            differing = con.execute(
                f"SELECT count(*) FROM ((SELECT * FROM {parquet(ours)} EXCEPT ALL SELECT * FROM "
                f"{parquet(theirs)}) UNION ALL (SELECT * FROM {parquet(theirs)} EXCEPT ALL "
                f"SELECT * FROM {parquet(ours)}))"
            ).fetchall()[0][0]
    return statistics.median(runs["feast"]), statistics.median(runs["plain"]), int(differing)


def _timed(call: Callable[[], None]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def _write_frame(config: PipelineConfig, settings: Settings, target: Path) -> None:
    features, tables = config.features, current_tables(settings.home)
    folders = {t.name: settings.store.path(t.artifact) for t in tables.raw}
    with duckdb_session(target.parent, memory_limit_mb=4000, threads=2) as con:
        register_raw(con, folders, features, settings.feature_repo)
        set_window(con, config.window)
        query = read_query(settings.feature_repo, features.training_set.sql)
        con.execute(f"COPY ({query}) TO {sql_text(target)} (FORMAT parquet)")


def _through_feast(feast: FeatureStore, config: PipelineConfig, frame: Path, target: Path) -> None:
    spec = config.features.training_set
    job = feast.get_historical_features(
        entity_df=f"SELECT * FROM {parquet(frame)}",
        features=feast.get_feature_service(spec.feature_service),
        full_feature_names=True,
        filter_by_created_timestamp=True,
    )
    job.write_parquet(target, [spec.event_time, spec.row_id], 8192)


def _directly(
    feast: FeatureStore, config: PipelineConfig, folder: Path, frame: Path, target: Path
) -> None:
    """The join as one would write it by hand for these tables, with the same output."""
    spec = config.features.training_set
    service = feast.get_feature_service(spec.feature_service)
    selected, joins = ["e.*"], []
    for number, projection in enumerate(service.feature_view_projections):
        view = feast.get_feature_view(projection.name)
        side, keys = f"v{number}", [c.name for c in view.entity_columns]
        fresh = "true"
        if view.ttl:
            seconds = int(view.ttl.total_seconds())
            fresh = f"{side}.event_timestamp >= e.event_timestamp - INTERVAL {seconds} SECONDS"
        selected += [
            f"CASE WHEN {fresh} THEN {side}.{sql_name(f.name)} END AS "
            f"{sql_name(f'{view.name}__{f.name}')}"
            for f in projection.features
        ]
        equal = " AND ".join(f"e.{sql_name(k)} = {side}.{sql_name(k)}" for k in keys)
        table = (
            f"(SELECT *, greatest(event_timestamp, created) AS available FROM "
            f"{parquet(folder / view.batch_source.path)})"
        )
        joins.append(
            f"ASOF LEFT JOIN {table} AS {side} ON {equal} AND e.event_timestamp >= {side}.available"
        )
    query = f"SELECT {', '.join(selected)} FROM {parquet(frame)} AS e {' '.join(joins)}"
    order = names([spec.event_time, spec.row_id])
    with duckdb_session(target.parent, memory_limit_mb=3000, threads=2) as con:
        con.execute(
            f"COPY (SELECT * FROM ({query}) ORDER BY {order}) TO {sql_text(target)} "
            "(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 8192)"
        )
