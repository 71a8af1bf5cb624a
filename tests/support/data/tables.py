"""Tables for the validation tests: small hand-made ones, and a real week of the flights package."""

from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from zipfile import ZipFile

import duckdb
import pandas as pd
import pyarrow.parquet as pq

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import TableRef
from tasks.kernel.settings import PROJECT_ROOT, ArtifactStore, StagedFolder, content_key
from tasks.validation.subject import Subject, open_subject
from tasks.validation.suites import Rule, Suite
from tests.support.data.repository import package_folder, scratch_folder

REPO = PROJECT_ROOT / "feature_repo" / "flights"
WEEK = TimeWindow(
    start=datetime(2013, 3, 4, 5, tzinfo=UTC), end=datetime(2013, 3, 11, 5, tzinfo=UTC)
)
"""A week of New York days; a blizzard and the start of summer time lie in it."""

SNAPSHOT_SUITE = Suite.model_validate(
    {
        "suite": "training_set",
        "subject": "one row of tests.support.data.builders.frame",
        "columns": {
            "text": ["carrier", "origin", "dest"],
            "integer": ["flight_id", "is_late"],
            "number": ["distance", "minute_of_day", "late_rate_24h", "temp", "gust"],
            "timestamp": ["event_timestamp"],
        },
        "expectations": [
            {
                "type": "expect_column_values_to_be_in_set",
                "kwargs": {"column": "is_late", "value_set": [0, 1]},
                "says": "a label is 0 or 1",
            }
        ],
    }
)

TEXT = {
    "flights": ("carrier", "tailnum", "origin", "dest"),
    "weather": ("origin",),
    "planes": ("tailnum", "type", "manufacturer", "model", "engine"),
    "airports": ("faa", "name", "dst", "tzone"),
}
TIMED = ("flights", "weather")


def people() -> pd.DataFrame:
    """A table that is easy to spoil: 40 people with a unique name, an age and a birthday."""
    return pd.DataFrame(
        {
            "name": [f"person{n:02d}" for n in range(40)],
            "age": [20.0 + n for n in range(40)],
            "town": ["Nizwa", "Sur"] * 20,
            "born": pd.Series(pd.date_range("2013-03-05", periods=40, freq="h", tz="UTC")).astype(
                "datetime64[us, UTC]"
            ),
        }
    )


def suite(*rules: Rule, **changes: object) -> Suite:
    """A suite for `people`, with other fields where given."""
    fields: dict[str, object] = {
        "suite": "people",
        "subject": "one person",
        "columns": {"text": ["name", "town"], "number": ["age"], "timestamp": ["born"]},
        "expectations": rules or (between("age", 0, 120),),
    }
    return Suite.model_validate(fields | changes)


def between(column: str, low: float, high: float, **changes: object) -> Rule:
    """A rule that a column lies within bounds."""
    fields: dict[str, object] = {
        "type": "expect_column_values_to_be_between",
        "kwargs": {"column": column, "min_value": low, "max_value": high},
        "says": f"{column} lies between {low} and {high}",
    }
    return Rule.model_validate(fields | changes)


def opened(frame: pd.DataFrame, checked: Suite, folder: Path) -> AbstractContextManager[Subject]:
    """A table as the subject of a suite, written into a folder."""
    frame.to_parquet(folder / "people.parquet", index=False)
    return open_subject(folder / "people.parquet", checked.suite, checked, WEEK)


def store_table(store: ArtifactStore, frame: pd.DataFrame, name: str = "people") -> TableRef:
    """Put a frame into the store as one Parquet file."""

    def build(folder: StagedFolder) -> TableRef:
        frame.to_parquet(folder.path / f"{name}.parquet", index=False)
        return TableRef(name=name, artifact=folder.artifact(f"{name}.parquet"), num_rows=len(frame))

    key = content_key(name, frame.to_json(date_format="iso"), [str(t) for t in frame.dtypes])
    return store.build_once("tables", key, TableRef, build)


@cache
def year_file(table: str) -> Path:
    """Parquet of a whole raw table of the package."""
    package = package_folder()
    folder = scratch_folder(table)
    source = package / f"{table}.csv"
    if table == "flights":
        with ZipFile(package / "flights.csv.zip") as archive:
            source = Path(archive.extract("flights.csv", folder))
    texts = ", ".join(f"'{name}': 'VARCHAR'" for name in TEXT[table])
    rows = f"read_csv('{source}', nullstr = 'NA', sample_size = -1, types = {{{texts}}})"
    timed = " REPLACE (time_hour::TIMESTAMPTZ AS time_hour)" if table in TIMED else ""
    return _copied(f"SELECT *{timed} FROM {rows}", folder / f"{table}.parquet")


@cache
def part_of_year(table: str, start: datetime, end: datetime) -> Path:
    """Parquet of some days of a raw table; of the whole table where it has no history."""
    if table not in TIMED:
        return year_file(table)
    inside = f"time_hour >= '{start.isoformat()}' AND time_hour < '{end.isoformat()}'"
    target = scratch_folder(table) / f"{table}.parquet"
    return _copied(f"FROM '{year_file(table)}' WHERE {inside}", target)


def _copied(query: str, target: Path) -> Path:
    with duckdb.connect() as con:
        con.execute("SET TimeZone = 'UTC'")
        con.execute(f"COPY ({query}) TO '{target}' (FORMAT parquet)")
    return target


def real_table(store: ArtifactStore, table: str, change: str = "FROM rows") -> TableRef:
    """A real raw table, spoiled by a SQL query over `rows`."""
    return spoiled(store, table, part_of_year(table, WEEK.start, WEEK.end), change)


def spoiled(store: ArtifactStore, name: str, source: Path, change: str) -> TableRef:
    """What a SQL query makes of `rows`, a Parquet file or a folder of them, as a new table."""

    def build(folder: StagedFolder) -> TableRef:
        target = folder.path / f"{name}.parquet"
        files = source / "*.parquet" if source.is_dir() else source
        _copied(f"WITH rows AS (FROM '{files}') {change}", target)
        num_rows = pq.read_metadata(target).num_rows
        return TableRef(name=name, artifact=folder.artifact(target.name), num_rows=num_rows)

    return store.build_once("tables", content_key(name, str(source), change), TableRef, build)
