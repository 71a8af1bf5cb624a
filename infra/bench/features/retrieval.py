"""Historical retrieval of every row and view: the plug-in, plain DuckDB, and Feast's DuckDB store.

Every measurement is a process of its own; they take turns, so that a busy machine is busy for all.
CPU is that of the whole process, threads and kernel included, from the call to its result; memory
is the highest resident size of the whole process, imports included.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from feast import FeatureStore, FeatureView, Field, FileSource, RepoConfig
from feast.data_format import ParquetFormat
from feast.infra.offline_stores.file_source import SavedDatasetFileStorage

from flows.config import PipelineConfig, read_pipeline_config
from infra.bench.figures import Measured, at_least, at_most
from infra.bench.parts import Bench
from tasks.features.access.store import open_store, quiet
from tasks.features.config import TrainingSet
from tasks.features.offline.duck import (
    duckdb_session,
    names,
    parquet,
    set_window,
    sql_name,
    sql_text,
)
from tasks.features.tables.build import current_tables, features_folder, read_query, register_raw
from tasks.kernel.settings import PROJECT_ROOT, Settings

ROUNDS = 3
TIMES = 10
"""How much longer the long entity frame is."""
MEMORY_LIMIT_MB = 2000
"""DuckDB's limit in the run on the long frame."""
MEMORY_CAP_BYTES = 3 * 2**30
"""What the whole process may hold in that run."""


@dataclass(frozen=True)
class Cost:
    """What one retrieval took."""

    cpu_s: float
    wall_s: float
    peak_bytes: int
    num_rows: int


@dataclass(frozen=True)
class RetrievalCosts:
    """Costs by kind of run, each the one of the median CPU of its rounds."""

    plugin: Cost
    plain: Cost
    stock: Cost
    plugin_sorted: Cost
    plain_sorted: Cost
    plugin_streamed: Cost
    plugin_streamed_long: Cost
    rows_other_than_plain: int
    """Rows in one result but not in the other, all columns."""
    rows_other_than_stock: int


def figures(bench: Bench) -> Measured:
    """Measure, and hold the costs against their bounds."""
    costs = compare_stores(bench.config, bench.settings, bench.size(ROUNDS, 1), bench.folder)
    ours, long = costs.plugin, costs.plugin_streamed_long
    growth = long.cpu_s / costs.plugin_streamed.cpu_s
    differing = costs.rows_other_than_plain + costs.rows_other_than_stock
    ordered = f"{costs.plugin_sorted.cpu_s:.1f} s to {costs.plain_sorted.cpu_s:.1f} s"
    return [
        at_most(
            "retrieval by Feast to plain ASOF join, CPU",
            ours.cpu_s / costs.plain.cpu_s,
            1.6,
            f"{ours.cpu_s:.1f} s to {costs.plain.cpu_s:.1f} s, {ours.num_rows:,} rows",
        ),
        at_most(
            "the same, sorted into a Parquet file",
            costs.plugin_sorted.cpu_s / costs.plain_sorted.cpu_s,
            1.6,
            ordered,
        ),
        at_least(
            "Feast's DuckDB store to the plug-in, CPU",
            costs.stock.cpu_s / ours.cpu_s,
            8,
            f"{costs.stock.cpu_s:.1f} s to {ours.cpu_s:.1f} s",
        ),
        at_most("rows that differ among the three", float(differing), 0, "all columns"),
        at_most(
            f"CPU of {TIMES} times the rows",
            growth,
            12,
            f"{long.cpu_s:.1f} s for {long.num_rows:,} rows, streamed to Parquet",
        ),
        at_most(
            "peak memory of that, GiB",
            long.peak_bytes / 2**30,
            MEMORY_CAP_BYTES / 2**30,
            f"DuckDB limited to {MEMORY_LIMIT_MB} MB",
        ),
    ]


def compare_stores(
    config: PipelineConfig, settings: Settings, num_rounds: int, folder: Path
) -> RetrievalCosts:
    """Run every kind in turn on all rows; Feast's own store and the long frame once."""
    kinds = ["plugin", "plain", "plugin_sorted", "plain_sorted", "plugin_streamed"]
    frame, long = folder / "frame.parquet", folder / "long.parquet"
    _write_frame(config, settings, frame)
    _write_long_frame(config.features.training_set, frame, long)

    def run(kind: str, rows: Path = frame, memory_limit_mb: int = 0) -> Cost:
        return _measured(kind, settings, rows, folder / f"{kind}.parquet", memory_limit_mb)

    rounds = [{kind: run(kind) for kind in kinds} for _ in range(num_rounds)]
    stock = run("stock")
    others = [
        _differing(folder / "plugin.parquet", folder / f"{k}.parquet") for k in ("plain", "stock")
    ]
    streamed_long = run("plugin_streamed", long, MEMORY_LIMIT_MB)
    middle = {kind: _median([costs[kind] for costs in rounds]) for kind in kinds}
    return RetrievalCosts(
        **middle,
        stock=stock,
        plugin_streamed_long=streamed_long,
        rows_other_than_plain=others[0],
        rows_other_than_stock=others[1],
    )


def _median(costs: list[Cost]) -> Cost:
    middle = statistics.median_low(cost.cpu_s for cost in costs)
    return next(cost for cost in costs if cost.cpu_s == middle)


def _differing(one: Path, other: Path) -> int:
    """Rows in one result but not in the other.

    Raises:
        RuntimeError: one has a column that the other lacks, so not the same was asked for.
    """
    with duckdb.connect() as con:
        ours, theirs = (set(pq.read_schema(file).names) for file in (one, other))
        if only := ours ^ theirs:
            raise RuntimeError(
                f"{one.stem} has {len(ours)} columns and {other.stem} {len(theirs)}; expected the "
                f"same, and one alone has {sorted(only)[:8]}"
            )
        columns = names(sorted(ours))  # Feast's own store gives them in another order
        mine, other_rows = (f"SELECT {columns} FROM {parquet(file)}" for file in (one, other))
        counted = con.execute(
            f"SELECT (SELECT count(*) FROM ({mine} EXCEPT ALL {other_rows})) + "
            f"(SELECT count(*) FROM ({other_rows} EXCEPT ALL {mine}))"
        ).fetchall()
    return int(counted[0][0])


def _write_frame(config: PipelineConfig, settings: Settings, target: Path) -> None:
    features, tables = config.features, current_tables(settings.home)
    folders = {t.name: settings.store.path(t.artifact) for t in tables.raw}
    with duckdb_session(target.parent, memory_limit_mb=4000, threads=2) as con:
        register_raw(con, folders, features, settings.feature_repo)
        set_window(con, config.window)
        query = read_query(settings.feature_repo, features.training_set.sql)
        con.execute(f"COPY ({query}) TO {sql_text(target)} (FORMAT parquet)")


def _write_long_frame(spec: TrainingSet, frame: Path, target: Path) -> None:
    """The same rows several times, with ids of their own and moments that lie minutes apart."""
    row_id, moment = sql_name(spec.row_id), sql_name(spec.event_time)
    with duckdb_session(target.parent, memory_limit_mb=2000, threads=2) as con:
        con.execute(
            f"COPY (SELECT * REPLACE ({row_id}::VARCHAR || '-' || k AS {row_id}, "
            f"{moment} + to_minutes(7 * k) AS {moment}) FROM {parquet(frame)}, "
            f"range({TIMES}) AS r(k)) TO {sql_text(target)} (FORMAT parquet)"
        )


def _measured(
    kind: str, settings: Settings, frame: Path, target: Path, memory_limit_mb: int
) -> Cost:
    """Run one kind in a process of its own; its result lies in `target` afterwards."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "infra.bench.features.retrieval",
            kind,
            frame,
            target,
            str(memory_limit_mb),
        ],
        cwd=PROJECT_ROOT,
        env={**os.environ, "FALAJ_HOME": str(settings.home)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{kind} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def main(kind: str, frame: str, target: str, memory_limit_mb: str) -> None:
    """One measured run; prints its cost as JSON."""
    run = _Run(kind, Path(frame), Path(target), int(memory_limit_mb))
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    table = getattr(run, kind)()
    after, wall_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - started
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    peak_bytes = _peak_bytes()
    if table is not None:  # not part of what is measured
        pq.write_table(table, run.target)
    num_rows = pq.read_metadata(run.target).num_rows
    print(
        json.dumps(
            {"cpu_s": cpu_s, "wall_s": wall_s, "peak_bytes": peak_bytes, "num_rows": num_rows}
        )
    )


def _peak_bytes() -> int:
    """Highest resident size of this program; what `getrusage` says includes its parent's."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


class _Run:
    """The kinds of runs; each gives an Arrow table, or None where it wrote the target."""

    def __init__(self, kind: str, frame: Path, target: Path, memory_limit_mb: int) -> None:
        settings = Settings.from_environment()
        self.spec = read_pipeline_config(settings.feature_repo).features.training_set
        self.frame, self.target = frame, target
        self.folder = features_folder(current_tables(settings.home), settings.store)
        self.feast = open_store(settings.home, settings.feature_repo, self.folder)
        self.service = self.feast.get_feature_service(self.spec.feature_service)
        if memory_limit_mb:
            self.feast.config.offline_store.memory_limit_mb = memory_limit_mb
        if kind == "stock":  # made before anything is measured
            self.plain_feast = self._plain_feast()

    def plugin(self) -> pa.Table:
        return self._job().to_arrow()

    def plugin_sorted(self) -> None:
        self._job().write_parquet(self.target, [self.spec.event_time, self.spec.row_id], 8192)

    def plugin_streamed(self) -> None:
        self._job().persist(SavedDatasetFileStorage(str(self.target)), allow_overwrite=True)

    def plain(self) -> pa.Table:
        return self._directly(lambda con, query: con.sql(query).to_arrow_table())

    def plain_sorted(self) -> None:
        order = names([self.spec.event_time, self.spec.row_id])
        self._directly(
            lambda con, query: (
                con.execute(
                    f"COPY (SELECT * FROM ({query}) ORDER BY {order}) TO {sql_text(self.target)} "
                    "(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 8192)"
                )
                and None
            )
        )

    def stock(self) -> pa.Table:
        """Feast's DuckDB store, through Feast: the plain names of the views and of their features.

        Feast's stores read no versions of views, so the store has a registry of its own.
        """
        job = self.plain_feast.get_historical_features(
            entity_df=pq.read_table(self.frame).to_pandas(),
            features=[f"{view.name}:{f.name}" for view, fs in self._read() for f in fs],
            full_feature_names=True,
            filter_by_created_timestamp=True,
        )
        return job.to_arrow()

    def _read(self) -> list[tuple[FeatureView, list[Field]]]:
        """Views of the service, as they are now, and what of each the service reads."""
        return [
            (self.feast.get_feature_view(projection.name), list(projection.features))
            for projection in self.service.feature_view_projections
        ]

    def _plain_feast(self) -> FeatureStore:
        """Feast with its stock stores on the same tables, and views without versions."""
        store = FeatureStore(
            config=RepoConfig(
                project="bench",
                provider="local",
                registry=str(self.target.with_suffix(".registry")),
                offline_store={"type": "duckdb"},
                online_store={"type": "sqlite", "path": str(self.target.with_suffix(".db"))},
                entity_key_serialization_version=3,
            )
        )
        entities = {entity.name: entity for entity in self.feast.list_entities()}
        views = [
            FeatureView(
                name=view.name,
                entities=[entities[name] for name in view.entities],
                ttl=view.ttl,
                schema=[*view.entity_columns, *fields],
                source=FileSource(
                    name=view.name,
                    path=str(self.folder / view.batch_source.path / "*.parquet"),
                    file_format=ParquetFormat(),
                    timestamp_field=view.batch_source.timestamp_field,
                    created_timestamp_column=view.batch_source.created_timestamp_column,
                ),
            )
            for view, fields in self._read()
        ]
        with quiet():
            store.apply([*entities.values(), *views])
        return store

    def _job(self) -> Any:
        return self.feast.get_historical_features(
            entity_df=f"SELECT * FROM {parquet(self.frame)}",
            features=self.service,
            full_feature_names=True,
            filter_by_created_timestamp=True,
        )

    def _directly(self, use: Callable[[duckdb.DuckDBPyConnection, str], Any]) -> Any:
        """The join as one would write it by hand for these tables, with the same output."""
        selected, joins = ["e.*"], []
        for number, (view, fields) in enumerate(self._read()):
            side, keys = f"v{number}", [c.name for c in view.entity_columns]
            fresh = "true"
            if view.ttl:
                seconds = int(view.ttl.total_seconds())
                fresh = f"{side}.event_timestamp >= e.event_timestamp - INTERVAL {seconds} SECONDS"
            selected += [
                f"CASE WHEN {fresh} THEN {side}.{sql_name(f.name)} END AS "
                f"{sql_name(f'{view.name}__{f.name}')}"
                for f in fields
            ]
            equal = " AND ".join(f"e.{sql_name(k)} = {side}.{sql_name(k)}" for k in keys)
            table = (
                f"(SELECT *, greatest(event_timestamp, created) AS available FROM "
                f"{parquet(self.folder / view.batch_source.path)})"
            )
            on = f"{equal} AND e.event_timestamp >= {side}.available"
            joins.append(f"ASOF LEFT JOIN {table} AS {side} ON {on}")
        query = f"SELECT {', '.join(selected)} FROM {parquet(self.frame)} AS e {' '.join(joins)}"
        with duckdb_session(self.target.parent, memory_limit_mb=3000, threads=2) as con:
            return use(con, query)


if __name__ == "__main__":
    main(*sys.argv[1:])
