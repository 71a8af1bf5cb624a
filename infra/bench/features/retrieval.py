"""Historical retrieval of every row and view: the plug-in, bare polars, and Feast's DuckDB store.

Every measurement is a process of its own; they take turns, so that a busy machine is busy for all.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from feast import FeatureStore, FeatureView, Field, FileSource
from feast.data_format import ParquetFormat
from feast.infra.offline_stores.file_source import SavedDatasetFileStorage

from flows.config import PipelineConfig, read_pipeline_config
from infra.bench.features.bare_join import measured
from infra.bench.figures import Measured, at_least, at_most
from infra.bench.parts import Bench, feast_store
from infra.bench.processes import run_python
from tasks.features.access.store import open_store, quiet
from tasks.features.config import TrainingSet
from tasks.features.declared.queries import frame_query
from tasks.features.offline import duck
from tasks.features.tables.build import Queries, current_tables, features_folder
from tasks.kernel.settings import Settings

TIMES = 10
"""How much longer the long entity frame is."""
MEMORY_LIMIT_MB = 2000
"""DuckDB's limit in the run on the long frame."""
HOW = {"full_feature_names": True, "filter_by_created_timestamp": True}


STOCK = "import sys; from infra.bench.features.retrieval import main; main(*sys.argv[1:])"
LEAN = "from tasks.features.access.profile import import_feast; import_feast(); " + STOCK
"""With Feast as every process here imports it; its own store runs with Feast as it comes."""


class Cost(NamedTuple):
    """What one retrieval took."""

    cpu_s: float
    peak_bytes: int
    num_rows: int


def figures(bench: Bench) -> Measured:
    """Measure, and hold the costs against their bounds."""
    folder, settings = bench.folder, bench.settings
    frame, long, views = folder / "frame.parquet", folder / "long.parquet", folder / "views.json"
    _write_frame(bench.config, settings, frame)
    _write_long_frame(bench.config.features.training_set, frame, long)
    views.write_text(json.dumps(_Run("views", frame, views, 0).described()))

    def run(kind: str, rows: Path = frame, memory_limit_mb: int = 0) -> Cost:
        """One kind in a process of its own; its result lies in `target` afterwards."""
        log, target = folder / f"{kind}.log", folder / f"{kind}.parquet"
        words = ["-c", STOCK if kind == "stock" else LEAN, kind, rows, target, memory_limit_mb]
        if kind == "bare":
            words = ["-m", "infra.bench.features.bare_join", views, rows, target]
        run_python([str(word) for word in words], log, limit_s=3600)
        return Cost(*json.loads(target.with_suffix(".json").read_text()))

    rounds = [(run("plugin"), run("bare")) for _ in range(bench.size(3, 1))]
    ours, bare = (sorted(costs)[len(rounds) // 2] for costs in zip(*rounds, strict=True))
    stock = run("stock")
    plugin = folder / "plugin.parquet"
    differing = sum(_differing(plugin, folder / f"{k}.parquet") for k in ("bare", "stock"))
    streamed = run("streamed", long, MEMORY_LIMIT_MB)
    sizes = [f"{cost.peak_bytes / 2**20:.0f} MiB" for cost in (ours, bare)]
    beside = f"{ours.cpu_s:.1f} s to {bare.cpu_s:.1f} s, {ours.num_rows:,} rows"
    written = f"{streamed.num_rows:,} rows to Parquet, DuckDB limited to {MEMORY_LIMIT_MB} MB"
    cpu, memory = ours.cpu_s / bare.cpu_s, ours.peak_bytes / bare.peak_bytes
    faster, peak = stock.cpu_s / ours.cpu_s, streamed.peak_bytes / 2**30
    theirs = f"{stock.cpu_s:.1f} s to {ours.cpu_s:.1f} s"
    return [
        at_most("retrieval by Feast to bare polars, CPU", cpu, 1.5, beside),
        at_most("the same, memory", memory, 2, " to ".join(sizes)),
        at_least("Feast's DuckDB store to the plug-in, CPU", faster, 8, theirs),
        at_most("rows that differ among the three", float(differing), 0, "all columns"),
        at_most(f"peak memory of {TIMES} times the rows, GiB", peak, 3, written),
    ]


def _differing(one: Path, other: Path) -> int:
    """Rows in one result but not in the other.

    Raises:
        RuntimeError: one has a column that the other lacks, so not the same was asked for.
    """
    with duckdb.connect() as con:
        ours, theirs = (set(pl.read_parquet_schema(file)) for file in (one, other))
        if only := ours ^ theirs:
            raise RuntimeError(f"{one.stem} and {other.stem} differ in columns {sorted(only)[:8]}")
        columns = duck.names(sorted(ours))  # Feast's own store gives them in another order
        mine, other_rows = (f"SELECT {columns} FROM {duck.parquet(file)}" for file in (one, other))
        counted = con.execute(
            f"SELECT (SELECT count(*) FROM ({mine} EXCEPT ALL {other_rows})) + "
            f"(SELECT count(*) FROM ({other_rows} EXCEPT ALL {mine}))"
        ).fetchall()
    return int(counted[0][0])


def _write_frame(config: PipelineConfig, settings: Settings, target: Path) -> None:
    features, tables = config.features, current_tables(settings.home, settings.store)
    folders = {t.name: settings.store.path(t.artifact) for t in tables.raw}
    with duck.duckdb_session(target.parent, memory_limit_mb=4000, threads=2) as con:
        Queries(con, features, settings.feature_repo, spark=None).register_raw(folders)
        duck.set_window(con, config.window)
        query = frame_query(settings.feature_repo, features)
        con.execute(f"COPY ({query}) TO {duck.sql_text(target)} (FORMAT parquet)")


def _write_long_frame(spec: TrainingSet, frame: Path, target: Path) -> None:
    """The same rows several times, with ids of their own and moments that lie minutes apart."""
    row_id, moment = duck.sql_name(spec.row_id), "event_timestamp"
    with duck.duckdb_session(target.parent, memory_limit_mb=2000, threads=2) as con:
        con.execute(
            f"COPY (SELECT * REPLACE ({row_id}::VARCHAR || '-' || k AS {row_id}, "
            f"{moment} + to_minutes(7 * k) AS {moment}) FROM {duck.parquet(frame)}, "
            f"range({TIMES}) AS r(k)) TO {duck.sql_text(target)} (FORMAT parquet)"
        )


class _Run:
    """The kinds of runs; each gives an Arrow table, or None where it wrote the target."""

    def __init__(self, kind: str, frame: Path, target: Path, memory_limit_mb: int) -> None:
        settings = Settings.from_environment()
        self.spec = read_pipeline_config(settings.feature_repo).features.training_set
        self.frame, self.target = frame, target
        self.folder = features_folder(current_tables(settings.home, settings.store), settings.store)
        self.feast = open_store(settings.home, settings.feature_repo, self.folder)
        self.service = self.feast.get_feature_service(self.spec.feature_service)
        if memory_limit_mb:
            self.feast.config.offline_store.memory_limit_mb = memory_limit_mb
        if kind == "stock":  # made before anything is measured
            self.plain_feast = self._plain_feast()

    def plugin(self) -> pa.Table:
        return self._job().to_arrow()

    def streamed(self) -> None:
        self._job().persist(SavedDatasetFileStorage(str(self.target)), allow_overwrite=True)

    def described(self) -> list[dict[str, Any]]:
        """What the bare join needs to know of each view."""
        return [
            {
                "name": view.name,
                "folder": str(self.folder / view.batch_source.path),
                "keys": [column.name for column in view.entity_columns],
                "ttl_s": int(view.ttl.total_seconds()) if view.ttl else 0,
                "features": [feature.name for feature in features],
            }
            for view, features in self._read()
        ]

    def stock(self) -> pa.Table:
        """Feast's DuckDB store, through Feast: the plain names of the views and of their features.

        Feast's stores read no versions of views, so the store has a registry of its own.
        """
        rows = pq.read_table(self.frame).to_pandas()
        names = [f"{view.name}:{f.name}" for view, fs in self._read() for f in fs]
        return self.plain_feast.get_historical_features(rows, names, **HOW).to_arrow()

    def _read(self) -> list[tuple[FeatureView, list[Field]]]:
        """Views of the service, as they are now, and what of each the service reads."""
        return [
            (self.feast.get_feature_view(projection.name), list(projection.features))
            for projection in self.service.feature_view_projections
        ]

    def _plain_feast(self) -> FeatureStore:
        """Feast with its stock stores on the same tables, and views without versions."""
        registry = self.target.with_suffix(".registry")
        online = {"type": "sqlite", "path": str(self.target.with_suffix(".db"))}
        store = feast_store(registry, offline_store={"type": "duckdb"}, online_store=online)
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
        rows = f"SELECT * FROM {duck.parquet(self.frame)}"
        return self.feast.get_historical_features(rows, self.service, **HOW)


def main(kind: str, frame: str, target: str, memory_limit_mb: str) -> None:
    """One measured run."""
    run = _Run(kind, Path(frame), Path(target), int(memory_limit_mb))
    measured(run.target, getattr(run, kind), pq.write_table)
