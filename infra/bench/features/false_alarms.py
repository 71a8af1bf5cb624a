"""How often the suites refuse a clean day: every daily window of a year, one after the other.

The rows are those of a state folder in which the whole year was refreshed. Each day is cut out and
judged as a window of its own.
"""

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import duckdb

from flows.config import PipelineConfig, suites_of
from infra.bench.figures import Measured, at_most
from infra.bench.parts import Bench
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import LandedRows
from tasks.features.entities import EVENT_TIME
from tasks.features.offline.duck import sql_text
from tasks.features.tables.build import published_path
from tasks.features.tables.landing import land_raw_rows
from tasks.kernel.settings import Settings
from tasks.validation.expectations import compile_suite, run_checks
from tasks.validation.outcome import failure_in_words
from tasks.validation.subject import open_subject
from tasks.validation.suites import Suite

DAY = timedelta(days=1)


@dataclass(frozen=True)
class Source:
    """One table of the year and the suite that judges it."""

    name: str
    suite: Suite
    files: Path
    time_column: str | None
    references: dict[str, Path]


def figures(bench: Bench) -> Measured:
    """Daily windows with an alarm of any suite."""
    config, started = bench.config, time.monotonic()
    if bench.small:
        week = TimeWindow(start=config.window.start, end=config.window.start + 7 * DAY)
        config = config.model_copy(update={"window": week})
    sources = list(_sources(config, bench.settings))
    jobs = [(source, config.window, bench.folder / source.name) for source in sources]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=2, mp_context=context) as pool:
        results = list(pool.map(_sweep, *zip(*jobs, strict=True)))
    alarms = {day for found, _ in results for day in found}
    ends = [s.suite.baseline.window.end for s in sources if s.suite.baseline]
    after = max(ends, default=config.window.start)
    every = [day.start for day in _days(config.window)]
    later = [day for day in every if day >= after]
    num_judged = sum(judged for _, judged in results)
    seconds = f"{num_judged:,} judgements, {time.monotonic() - started:.0f} s"
    counted = f"{len(alarms)} of {len(every)} days, {seconds}"
    share, share_later = len(alarms) / len(every), len(alarms & set(later)) / max(len(later), 1)
    days = f"of {len(later)} days"
    return [
        at_most("daily windows with a false alarm, share", share, 0.01, counted),
        at_most("the same after the baseline window, share", share_later, 0.01, days),
    ]


def _sources(config: PipelineConfig, settings: Settings) -> Iterator[Source]:
    repo, store = settings.feature_repo, settings.store
    suites = suites_of(config, repo)
    landed: LandedRows = land_raw_rows(config.window, config.features, repo, store)
    files = {table.name: store.path(table.artifact) for table in landed.tables}
    for raw in config.features.raw_tables:
        suite = suites.rows[raw.name]
        references = {name: files[name] for name in suite.references}
        yield Source(f"raw-{raw.name}", suite, files[raw.name], raw.time_column, references)
    for table in config.features.feature_tables:
        folder = published_path(settings.home) / table.name
        column = None if table.static else "event_timestamp"
        yield Source(f"feature-{table.name}", suites.tables[table.name], folder, column, {})
    snapshots = (store.root / "snapshots").glob("*/data.parquet")
    largest = max(snapshots, key=lambda file: file.stat().st_size)
    yield Source("training", suites.training_set, largest, EVENT_TIME, {})


def _days(window: TimeWindow) -> Iterator[TimeWindow]:
    start = window.start
    while start + DAY <= window.end:
        yield TimeWindow(start=start, end=start + DAY)
        start += DAY


def _sweep(source: Source, window: TimeWindow, folder: Path) -> tuple[list[datetime], int]:
    """Days of one table with an alarm, each of which is printed, and number of judged days."""
    alarms: list[datetime] = []
    cut = _cut_into_days(source, window, folder)
    days = [day for day in _days(window) if f"{day.start:%Y%m%d}" in cut]
    for day in days:
        path = cut[f"{day.start:%Y%m%d}"]
        with open_subject(path, source.name, source.suite, day) as subject:
            failed: Sequence[object] = subject.table_faults()
            if not failed:
                checks = compile_suite(source.suite, subject.derive(source.references))
                critical = [check for check in checks if check.rule.severity == "critical"]
                judged = run_checks(critical, subject, source.suite)
                results = [j.result for j in judged if j.result and not j.result["success"]]
                failed = [failure_in_words(result) for result in results]
        if failed:
            print(f"{day.start:%Y-%m-%d}  {source.suite.suite}: {failed}")
            alarms.append(day.start)
    return alarms, len(days)


def _cut_into_days(source: Source, window: TimeWindow, folder: Path) -> dict[str, Path]:
    """A file for each day with rows; a table without history is the same file on each day.

    A static table is asked once a month: only the window it is asked for differs.
    """
    if source.time_column is None:
        return {f"{day.start:%Y%m%d}": source.files for day in _days(window) if day.start.day == 1}
    files = source.files / "*.parquet" if source.files.is_dir() else source.files
    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        con.execute("SET threads = 1")
        moment = f'"{source.time_column}"'
        start = f"TIMESTAMPTZ '{window.start.isoformat()}'"
        bucket = f"strftime(time_bucket(INTERVAL 24 HOURS, {moment}, {start}), '%Y%m%d')"
        con.execute(
            f"COPY (SELECT *, {bucket} AS falaj_day FROM read_parquet({sql_text(files)}, "
            f"hive_partitioning = false) WHERE {moment} >= {start}) TO {sql_text(folder)} "
            "(FORMAT parquet, PARTITION_BY (falaj_day))"
        )
    return {part.name.split("=")[1]: part for part in folder.iterdir()}
