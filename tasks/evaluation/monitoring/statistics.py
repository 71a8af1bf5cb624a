"""Statistics of feature tables by day, by DuckDB; and counts by bin, on a sample, for drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import numpy as np
from numpy.typing import NDArray

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import DataContractError

DAY = timedelta(days=1)
MEMORY_LIMIT = "2GB"
EVENT_TIME, CREATED = "event_timestamp", "created"
NUM_BINS = 10
SAMPLE_ROWS = 60_000  # of a view that drift is measured on, spread evenly
_NUMBERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "FLOAT", "DOUBLE")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ViewTable:
    """One feature view as the offline store has it.

    Args:
        name: of the view.
        folder: Parquet files.
        keys: entity keys.
    """

    name: str
    folder: Path
    keys: tuple[str, ...]


@dataclass(frozen=True)
class ViewDay:
    """One day of a view: volume, freshness at its end, and lag from event to store."""

    start: datetime
    num_rows: int
    num_entities: int
    age_hours: float
    lag_minutes: float


@dataclass(frozen=True)
class FeatureDay:
    """One day of a feature; None where no value is known. Text has `distinct` and `top_share`."""

    feature: str
    start: datetime
    num_rows: int
    null_rate: float
    mean: float | None = None
    std: float | None = None
    low: float | None = None
    q05: float | None = None
    median: float | None = None
    q95: float | None = None
    high: float | None = None
    distinct: int | None = None
    top_share: float | None = None


@dataclass(frozen=True)
class Binned:
    """Rows of a feature by day and bin.

    The first bin is for nulls, the second for zeros (counts and rain are mostly zero), then the
    tenths of the other values of the baseline.

    Args:
        feature: its name.
        days: numbers of the days, shape (days,).
        counts: rows, shape (days, bins).
    """

    feature: str
    days: NDArray[np.int64]
    counts: Floats


def features_of(con: duckdb.DuckDBPyConnection, view: ViewTable) -> dict[str, bool]:
    """Features of a view; True for numbers, False for text.

    Raises:
        DataContractError: the table lacks one of its times or keys.
    """
    rows = con.execute(f"DESCRIBE SELECT * FROM {parquet(view.folder)}").fetchall()
    types = {str(row[0]): str(row[1]) for row in rows}
    needed = {*view.keys, EVENT_TIME, CREATED}
    if missing := sorted(needed - types.keys()):
        raise DataContractError(
            f"feature view {view.name} has no column {', '.join(missing)}; expected its keys, "
            f"{EVENT_TIME} and {CREATED}. Nothing was monitored"
        )
    return {name: kind in _NUMBERS for name, kind in types.items() if name not in needed}


def view_days(con: duckdb.DuckDBPyConnection, view: ViewTable, window: TimeWindow) -> list[ViewDay]:
    """Volume and freshness of every whole day of the window, days without rows included."""
    key = f"row({', '.join(_q(name) for name in view.keys)})"
    found = {
        row[0]: row[1:]
        for row in con.execute(
            f"SELECT {_bucket(window)}, count(*), count(DISTINCT {key}), max({EVENT_TIME}), "
            f"median(epoch({CREATED} - {EVENT_TIME})) / 60 FROM {parquet(view.folder)} "
            f"WHERE {_inside(window)} GROUP BY ALL"
        ).fetchall()
    }
    newest = _newest_before(con, view, window)
    days = []
    for start in day_starts(window):
        num_rows, num_entities, last, lag = found.get(start, (0, 0, None, float("nan")))
        newest = last or newest
        age = (start + DAY - newest).total_seconds() / 3600 if newest else float("inf")
        days.append(ViewDay(start, int(num_rows), int(num_entities), age, float(lag)))
    return days


def feature_days(
    con: duckdb.DuckDBPyConnection,
    view: ViewTable,
    features: dict[str, bool],
    window: TimeWindow,
) -> list[FeatureDay]:
    """Statistics of every feature on every whole day with rows, in one pass over the table."""
    selected = ", ".join(
        _statistics_of_number(_q(name)) if number else _statistics_of_text(_q(name))
        for name, number in features.items()
    )
    if not selected:
        return []
    rows = con.execute(
        f"SELECT {_bucket(window)} AS falaj_day, count(*), {selected} "
        f"FROM {parquet(view.folder)} WHERE {_inside(window)} GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    return [
        _feature_day(name, number, row[0], int(row[1]), row[2 + place])
        for row in rows
        for place, (name, number) in enumerate(features.items())
    ]


def binned(
    con: duckdb.DuckDBPyConnection,
    view: ViewTable,
    features: Sequence[str],
    window: TimeWindow,
    baseline: TimeWindow,
    origin: datetime,
) -> list[Binned]:
    """Rows by day and bin of number features, on an even sample of rows of both windows.

    Bins come from the baseline; the days are those of both windows, in order, counted from
    `origin`.
    """
    both = f"(({_inside(window)}) OR ({_inside(baseline)}))"
    source = f"{parquet(view.folder)} WHERE {both}"
    total = con.execute(f"SELECT count(*) FROM {source}").fetchall()[0][0]
    every = max(1, -(-total // SAMPLE_ROWS))
    key = ", ".join(_q(name) for name in (*view.keys, EVENT_TIME))
    columns = ", ".join(f"{_q(name)}::DOUBLE AS {_q(name)}" for name in features)
    arrow = con.sql(
        f"SELECT floor(epoch({EVENT_TIME} - {_moment(origin)}) / 86400)::BIGINT "
        f"AS falaj_day, ({_inside(baseline)}) AS falaj_baseline, {columns} FROM {source} "
        f"AND hash({key}) % {every} = 0"
    ).to_arrow_table()
    offsets = arrow["falaj_day"].to_numpy()
    is_baseline = arrow["falaj_baseline"].to_numpy()
    days, place = np.unique(offsets, return_inverse=True)
    return [
        Binned(name, days, _counts(np.asarray(arrow[name]), place, len(days), is_baseline))
        for name in features
    ]


def day_starts(window: TimeWindow) -> list[datetime]:
    """Starts of the whole days of a window, counted from its start."""
    num_days = int((window.end - window.start) / DAY)
    return [window.start + n * DAY for n in range(num_days)]


def parquet(folder: Path) -> str:
    """Table function over all Parquet files of a folder."""
    pattern = str(folder / "*.parquet").replace("'", "''")
    return f"read_parquet('{pattern}', hive_partitioning = false)"


def _counts(
    values: Floats, place: NDArray[np.int64], num_days: int, is_baseline: NDArray[np.bool_]
) -> Floats:
    known = values[is_baseline & ~np.isnan(values) & (values != 0)]
    tenths = np.linspace(0, 1, NUM_BINS + 1)[1:-1]
    edges: Floats = np.unique(np.quantile(known, tenths)) if len(known) else np.empty(0)
    bins = np.searchsorted(edges, values, side="left") + 2
    bins[values == 0] = 1
    bins[np.isnan(values)] = 0
    width = len(edges) + 3
    flat = np.bincount(place * width + bins, minlength=num_days * width)
    return flat.reshape(num_days, width).astype(np.float64)


def _feature_day(
    name: str, number: bool, start: datetime, rows: int, found: dict[str, object]
) -> FeatureDay:
    values = {key: _plain(value) for key, value in found.items() if key not in ("known", "q")}
    null_rate = 1 - float(str(found["known"])) / rows
    quantiles = found.get("q")
    if number and isinstance(quantiles, list):
        values |= dict(zip(("q05", "median", "q95"), map(_plain, quantiles), strict=True))
    return FeatureDay(name, start, rows, null_rate, **values)  # type: ignore[arg-type]


def _plain(value: object) -> float | None:
    if value is None:
        return None
    number = float(value)  # type: ignore[arg-type]
    return number if np.isfinite(number) else None


def _statistics_of_number(name: str) -> str:
    return (
        f"{{'known': count({name}), 'mean': avg({name}::DOUBLE), "
        f"'std': stddev_pop({name}::DOUBLE), 'low': min({name}), 'high': max({name}), "
        f"'q': quantile_cont({name}, [0.05, 0.5, 0.95])}}"
    )


def _statistics_of_text(name: str) -> str:
    return (
        f"{{'known': count({name}), 'distinct': count(DISTINCT {name}), "
        f"'top_share': list_max(map_values(histogram({name}))) / count({name})}}"
    )


def _newest_before(
    con: duckdb.DuckDBPyConnection, view: ViewTable, window: TimeWindow
) -> datetime | None:
    rows = con.execute(
        f"SELECT max({EVENT_TIME}) FROM {parquet(view.folder)} "
        f"WHERE {EVENT_TIME} < {_moment(window.start)}"
    ).fetchall()
    return rows[0][0]  # type: ignore[no-any-return]


def _bucket(window: TimeWindow) -> str:
    return f"time_bucket(INTERVAL 24 HOURS, {EVENT_TIME}, {_moment(window.start)})"


def _inside(window: TimeWindow) -> str:
    return f"{EVENT_TIME} >= {_moment(window.start)} AND {EVENT_TIME} < {_moment(window.end)}"


def _moment(moment: datetime) -> str:
    return f"TIMESTAMPTZ '{moment.astimezone(UTC).isoformat()}'"


def _q(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
