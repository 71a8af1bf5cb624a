"""Statistics of feature tables by day, by DuckDB; and counts by bin, on a sample, for drift."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import DataContractError

DAY = timedelta(days=1)
EVENT_TIME, CREATED = "event_timestamp", "created"
TENTHS = np.linspace(0, 1, 11)[1:-1]
SAMPLE_ROWS = 60_000  # of a view that drift is measured on, spread evenly
_NUMBERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "FLOAT", "DOUBLE")
_INSIDE = f"{EVENT_TIME} >= $start AND {EVENT_TIME} < $end"
_DAY = f"time_bucket(INTERVAL 24 HOURS, {EVENT_TIME}, $start) AS start"
Floats = NDArray[np.float64]


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

    def between(self, first: int, after: int) -> Floats:
        """Rows of some days, by day and bin."""
        return self.counts[(self.days >= first) & (self.days < after)]


class ViewTable:
    """One feature view as the offline store has it; one a connection is open at a time.

    Args:
        con: takes the view's rows as its own view `feature_rows`.
        name: of the feature view.
        folder: Parquet files.
        keys: entity keys.

    Raises:
        DataContractError: the table lacks one of its times or keys.
    """

    def __init__(
        self, con: duckdb.DuckDBPyConnection, name: str, folder: Path, keys: Collection[str]
    ) -> None:
        rows = con.read_parquet(str(folder / "*.parquet"), hive_partitioning=False)
        types = dict(zip(rows.columns, map(str, rows.types), strict=True))
        if missing := sorted({*keys, EVENT_TIME, CREATED} - types.keys()):
            raise DataContractError(
                f"feature view {name} has no column {', '.join(missing)}; expected its keys, "
                f"{EVENT_TIME} and {CREATED}. Nothing was monitored"
            )
        rows.create_view("feature_rows")
        self.name, self._con, self._keys = name, con, tuple(keys)
        self.features = [name for name in types if name not in (*keys, EVENT_TIME, CREATED)]
        self.numbers = [name for name in self.features if types[name] in _NUMBERS]

    def days(self, window: TimeWindow) -> pd.DataFrame:
        """Volume and freshness of every whole day of the window, days without rows included.

        Returns:
            By start of the day `num_rows`, `age_hours` of the newest row at the day's end, which
            is endless before the first row, and `lag_minutes` from event to store.
        """
        found = self._ask(
            f"SELECT {_DAY}, count(*) AS num_rows, max({EVENT_TIME}) AS newest, "
            f"median(epoch({CREATED} - {EVENT_TIME})) / 60 AS lag_minutes "
            f"FROM feature_rows WHERE {_INSIDE} GROUP BY ALL",
            window,
        ).set_index("start")
        before = self._ask(
            f"SELECT max({EVENT_TIME}) AS newest FROM feature_rows WHERE {EVENT_TIME} < $start",
            window,
        )["newest"]
        starts = [window.start + n * DAY for n in range((window.end - window.start) // DAY)]
        days = found.reindex(pd.DatetimeIndex(starts, dtype="datetime64[us, UTC]", name="start"))
        ends = pd.Series(days.index, days.index) + DAY
        age = ends - days["newest"].ffill().fillna(before[0])
        days["age_hours"] = age.dt.total_seconds().fillna(np.inf) / 3600
        days["num_rows"] = days["num_rows"].fillna(0).astype(int)
        return days[["num_rows", "age_hours", "lag_minutes"]].reset_index()

    def entity_ages(
        self, window: TimeWindow, baseline: TimeWindow, least_share: float
    ) -> pd.DataFrame:
        """Age of each large entity's newest row at the end of every whole day of the window.

        Returns:
            Columns `start` of the day, `entity` and `age_hours`, of entities that have so large a
            share of the baseline's rows; NaN where there is no row yet.
        """
        keys = ", ".join(map(_q, self._keys))
        same = " AND ".join(f"ends.{_q(key)} = rows.{_q(key)}" for key in self._keys)
        named = ", ".join(f"ends.{_q(key)}" for key in self._keys)
        return self._ask(
            f"WITH usual AS (SELECT {keys}, count(*) AS falaj_rows FROM feature_rows "
            f"WHERE {EVENT_TIME} >= $first AND {EVENT_TIME} < $after GROUP BY ALL), "
            f"ends AS (SELECT {keys}, unnest(generate_series($start, $last, INTERVAL 24 HOURS)) "
            "AS start, start + INTERVAL 24 HOURS AS ended FROM usual "
            "WHERE falaj_rows >= $share * (SELECT sum(falaj_rows) FROM usual)) "
            f"SELECT ends.start, concat_ws(' ', {named}) AS entity, "
            f"epoch(ends.ended - rows.{EVENT_TIME}) / 3600 AS age_hours FROM ends "
            f"ASOF LEFT JOIN feature_rows AS rows ON {same} AND ends.ended > rows.{EVENT_TIME} "
            "ORDER BY entity, ends.start",
            window,
            first=baseline.start, after=baseline.end, last=window.end - DAY, share=least_share,
        )  # fmt: skip

    def feature_days(self, window: TimeWindow) -> pd.DataFrame:
        """Statistics of every feature on every day with rows, in one pass over the table.

        Returns:
            Columns `start`, `num_rows`, `feature`, `null_rate`; of numbers also `mean`, `q05`,
            `median` and `q95`, null where no value is known.
        """
        if not self.features:
            return pd.DataFrame(columns=["start", "num_rows", "feature", "null_rate"])
        each = ", ".join(_statistics(name, name in self.numbers) for name in self.features)
        found = self._ask(
            f"SELECT start, num_rows, unnest(found, recursive := true) FROM ("
            f"SELECT {_DAY}, count(*) AS num_rows, [{each}] AS found "
            f"FROM feature_rows WHERE {_INSIDE} GROUP BY ALL) ORDER BY start",
            window,
        )
        return found.replace([np.inf, -np.inf], np.nan)

    def binned(self, window: TimeWindow, baseline: TimeWindow, origin: datetime) -> list[Binned]:
        """Rows by day and bin of the numbers, on an even sample of rows of both windows.

        Bins come from the baseline; the days are counted from `origin`.
        """
        both = f"(({_INSIDE}) OR ({EVENT_TIME} >= $first AND {EVENT_TIME} < $after))"
        windows = {"first": baseline.start, "after": baseline.end}
        total = self._ask(f"SELECT count(*) AS n FROM feature_rows WHERE {both}", window, **windows)
        key = ", ".join(_q(name) for name in (*self._keys, EVENT_TIME))
        columns = "".join(f", {_q(name)}::DOUBLE AS {_q(name)}" for name in self.numbers)
        rows = self._ask(
            f"SELECT floor(epoch({EVENT_TIME} - $origin) / 86400)::BIGINT AS falaj_day, "
            f"{EVENT_TIME} >= $first AND {EVENT_TIME} < $after AS falaj_baseline{columns} "
            f"FROM feature_rows WHERE {both} AND hash({key}) % $every = 0",
            window, **windows, origin=origin, every=max(1, -(-int(total["n"][0]) // SAMPLE_ROWS)),
        )  # fmt: skip
        days, place = np.unique(rows["falaj_day"].to_numpy(), return_inverse=True)
        is_baseline = rows["falaj_baseline"].to_numpy(bool)
        return [
            Binned(name, days, _counts(rows[name].to_numpy(), place, len(days), is_baseline))
            for name in self.numbers
        ]

    def _ask(self, query: str, window: TimeWindow, **values: object) -> pd.DataFrame:
        given = {"start": window.start, "end": window.end, **values}
        used = {name: value for name, value in given.items() if f"${name}" in query}
        return self._con.execute(query, used).df()


def _counts(
    values: Floats, place: NDArray[np.int64], num_days: int, is_baseline: NDArray[np.bool_]
) -> Floats:
    known = values[is_baseline & ~np.isnan(values) & (values != 0)]
    edges: Floats = np.unique(np.quantile(known, TENTHS)) if len(known) else np.empty(0)
    bins = np.searchsorted(edges, values, side="left") + 2
    bins[values == 0], bins[np.isnan(values)] = 1, 0
    width = len(edges) + 3
    flat = np.bincount(place * width + bins, minlength=num_days * width)
    return flat.reshape(num_days, width).astype(np.float64)


def _statistics(feature: str, is_number: bool) -> str:
    name, number = _q(feature), f"{_q(feature)}::DOUBLE" if is_number else "NULL::DOUBLE"
    told = feature.replace("'", "''")
    quantiles = ", ".join(
        f"'{key}': quantile_cont({number}, {level})"
        for key, level in (("q05", 0.05), ("median", 0.5), ("q95", 0.95))
    )
    return (
        f"{{'feature': '{told}', 'null_rate': 1 - count({name}) / count(*), "
        f"'mean': avg({number}), {quantiles}}}"
    )


def _q(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
