"""Feature tables of 1, 10 and 100 times the rows, on DuckDB and on Spark in local mode.

January's flights, with keys of their own for each copy: so many times as many airports, planes and
carriers, each with the flights that it has. A process for each; its CPU and that of its children
counts from when Spark is up.
"""

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import duckdb
import psutil

from flows.config import read_pipeline_config
from infra.bench.figures import LeftOut, Measured, at_most, reported
from infra.bench.parts import Bench
from tasks.contracts.base import TimeWindow
from tasks.features.offline.duck import duckdb_session, sql_text
from tasks.features.offline.spark_tables import SparkTables, started
from tasks.features.tables.build import Queries
from tasks.features.tables.landing import land_raw_rows
from tasks.kernel.process import tree_cpu_s
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore

SPARK = PROJECT_ROOT / ".venv-cluster" / "bin" / "python"
ENGINES = {"DuckDB": Path(sys.executable), "Spark": SPARK}
REPO = PROJECT_ROOT / "feature_repo" / "flights"
RAW, COMPUTED = (
    TimeWindow(start=datetime.fromisoformat(a), end=datetime.fromisoformat("2013-02-01T00:00Z"))
    for a in ("2013-01-01T05:00Z", "2013-01-08T00:00Z")
)
KEYS = {"carrier", "tailnum", "origin", "dest", "faa"}
LOCAL = {"spark.master": "local[2]", "spark.driver.memory": "4g", "spark.ui.enabled": "false"}
LOCAL |= {"spark.sql.shuffle.partitions": "8", "spark.driver.host": "127.0.0.1"}


def figures(bench: Bench) -> Measured:
    """What each engine costs, and how it grows."""
    sizes, measured = bench.size((1, 10, 100), (1, 2, 3)), Measured()
    rows = {copies: _write_rows(bench.folder, copies) for copies in sizes}
    for engine, python in ENGINES.items():
        if not python.exists():
            measured.append(LeftOut(engine, "there is no environment .venv-cluster"))
            continue
        cpu_s, peak_gb = dict[int, float](), dict[int, float]()
        for copies in sizes:
            folder = str(bench.folder / str(copies))
            call = f"from {__name__} import compute; compute({engine!r}, {folder!r})"
            line = [str(python), "-c", call]
            ran = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
            cpu_s[copies], peak_gb[copies] = json.loads(ran.stdout.splitlines()[-1])
        one, ten, most = sizes
        for copies in (ten, most):
            ratio = cpu_s[copies] / rows[copies] / (cpu_s[one] / rows[one])
            evidence = f"{cpu_s[copies]:.1f} s to {cpu_s[one]:.1f} s, {rows[copies]:,} flights"
            name = f"{engine}: CPU of {copies} times the rows, to linear"
            measured.append(at_most(name, ratio, 1.2, evidence))
        slope = (cpu_s[most] - cpu_s[ten]) / (rows[most] - rows[ten])
        memory = f"peak of all its processes {peak_gb[most]:.1f} GB at {rows[most]:,}"
        measured.append(reported(f"{engine}: CPU a flight, microseconds", slope * 1e6, memory))
        name = f"{engine}: CPU of 10^9 flights, hours"
        measured.append(reported(name, slope * 1e9 / 3600, "extrapolated by the slope above"))
    return measured


def _write_rows(folder: Path, copies: int) -> int:
    """Raw tables with so many times the keys; the number of flights."""
    config, store = read_pipeline_config(REPO).features, ArtifactStore(folder / "store")
    (folder / str(copies)).mkdir()
    with duckdb.connect() as con:
        for ref in land_raw_rows(RAW, config, REPO, store).tables:
            file = f"{folder}/{copies}/{ref.name}.parquet"
            keys = KEYS & (config.columns_of(ref.name) or {}).keys()
            tagged = ", ".join(f"{key} || '.' || copy AS {key}" for key in keys)
            con.execute(
                f"COPY (SELECT * EXCLUDE (copy) REPLACE ({tagged}) "
                f"FROM {sql_text(store.path(ref.artifact))}, range({copies}) AS copies(copy)) "
                f"TO {sql_text(file)}"
            )
        flights = sql_text(f"{folder}/{copies}/flights.parquet")
        counted = con.execute(f"SELECT count(*) FROM {flights}")
        return int(counted.fetchall()[0][0])


def compute(engine: str, folder: str) -> None:
    """Compute all feature tables; print the CPU seconds, and the memory of all processes in GB."""
    config, scratch = read_pipeline_config(REPO).features, Path(folder)
    spark = SparkTables(started(LOCAL), None, scratch) if engine == "Spark" else None
    with duckdb_session(scratch) as con:
        before = tree_cpu_s()
        raw = {table.name: scratch / f"{table.name}.parquet" for table in config.raw_tables}
        queries = Queries(con, config, REPO, spark)
        queries.register_raw(raw)
        for table in config.feature_tables:
            queries.compute(table, COMPUTED, "computed")
            con.execute("SELECT count(*) FROM computed")
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        status = (Path(f"/proc/{process.pid}/status").read_text() for process in processes)
        peaks = [text.partition("VmHWM:")[2].split()[0] for text in status if "VmHWM:" in text]
        sys.stdout.write(f"\n{json.dumps([tree_cpu_s() - before, sum(map(int, peaks)) / 1e6])}\n")
