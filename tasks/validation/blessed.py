"""What the days of a blessed window were like: bands for statistics of a day, column by column.

A blessed file is made by `profiling`, read by a person and kept beside the hand-written suite. Here
is its form, and the SQL that holds a day of rows against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from tasks.contracts.base import TimeWindow

DAYS = "blessed_days"
"""Table of one row a day: for each column in words how it leaves its bands, null where it keeps."""

Statistic = Literal[
    "null_share",
    "distinct",
    "top_share",
    "low",
    "median",
    "high",
    "mean",
    "on_grid",
    "unseen_share",
]
MEANING: dict[str, str] = {
    "null_share": "share of nulls",
    "distinct": "number of different values",
    "top_share": "share of the most frequent value",
    "low": "5th percentile",
    "median": "median",
    "high": "95th percentile",
    "mean": "mean",
    "on_grid": "share of values on the grid of the readings",
    "unseen_share": "share of values that the blessed window never had",
}
FAULTS = {
    "rows": "truncated or doubled file",
    "hours": "missing hours",
    "null_share": "null burst",
    "distinct": "constant, frozen or rounded column",
    "top_share": "constant or frozen column",
    "low": "change of unit or scale",
    "median": "change of unit or scale",
    "high": "change of unit or scale",
    "mean": "change of unit or scale",
    "on_grid": "change of unit, mixed units or rounding",
    "unseen_share": "new category",
    "category": "missing or swapped categories",
    "relation": "mixed units, or rows shifted against each other",
}
"""Kind of fault that a statistic points to; stands before its sentence."""

NUMERIC_STATISTICS = ("low", "median", "high", "mean", "on_grid")
Bound = float | None
Band = tuple[Bound, Bound]
Query = Callable[[str], list[tuple[Any, ...]]]
GRID_TOLERANCE = 0.02
RELATION_TOLERANCE = 0.01
ROWS = "rows"
HOURS = "hours"


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Grid(_Value):
    """Readings are `offset + k * step` for whole k, as of an instrument that rounds."""

    step: float = Field(gt=0)
    offset: float = 0.0


class Relation(_Value):
    """A column that others decide, such as a distance by its two ends, with the blessed values."""

    by: tuple[str, ...] = Field(min_length=1, description="Columns that decide it.")
    values: dict[str, float] = Field(
        min_length=1, description="Their values with a blank between, to the value of the column."
    )
    max_share: float = Field(ge=0, le=1, description="Share of a day's rows that may contradict.")


class Blessed(_Value):
    """Bands from one blessed window, and where they come from."""

    suite: str
    window: TimeWindow
    table_sha256: str = Field(description="Digest of the table that was blessed.")
    num_rows: PositiveInt
    num_periods: PositiveInt = Field(description="Days that gave the bands; 1 for a static table.")
    margins: str = Field(min_length=1, description="How the bands were widened, in words.")
    reviewed: str = Field(min_length=1, description="When and how a person reviewed the file.")
    time_column: str | None = Field(
        description="Places a row in a day; none: the table as a whole."
    )
    min_rows: PositiveInt = Field(default=1, description="Days with fewer rows judge `rows` alone.")
    rows: Band
    hours: Band | None = Field(
        default=None, description="Hours of a day, of 24, in which there is a row."
    )
    bands: dict[str, dict[Statistic, Band]]
    grids: dict[str, Grid] = {}
    categories: dict[str, dict[str, tuple[float, float]]] = Field(
        default={}, description="Column to category to the share of a day's rows that has it."
    )
    known: dict[str, tuple[str, ...]] = Field(
        default={}, description="Column to every value it had; the others are `unseen`."
    )
    relations: dict[str, Relation] = {}

    @model_validator(mode="after")
    def _statistics_have_what_they_need(self) -> Blessed:
        for column, bands in self.bands.items():
            if "on_grid" in bands and column not in self.grids:
                raise ValueError(f"column {column} has a band for its grid and no grid")
            if "unseen_share" in bands and column not in self.known:
                raise ValueError(f"column {column} has a band for unseen values and no known ones")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the table of days that hold verdicts."""
        named = [*self.bands, *self.categories, *self.relations]
        extra = [ROWS, *([HOURS] if self.hours else [])]
        return tuple(dict.fromkeys([*extra, *named]))

    def only(self, columns: set[str]) -> Blessed:
        """The bands of some columns."""
        return self.model_copy(
            update={
                "bands": {name: bands for name, bands in self.bands.items() if name in columns},
                "categories": {n: c for n, c in self.categories.items() if n in columns},
                "relations": {n: r for n, r in self.relations.items() if n in columns},
            }
        )

    @property
    def needed_columns(self) -> set[str]:
        """Columns that the judged table must have."""
        by = {name for relation in self.relations.values() for name in relation.by}
        time = {self.time_column} if self.time_column else set()
        return {*self.bands, *self.categories, *self.relations, *by, *time}


@dataclass(frozen=True)
class _Measure:
    """One statistic of a day: its SQL, its band, and whose verdict it goes into."""

    column: str
    told: str
    sql: str
    band: Band
    fault: str
    always: bool = False  # asked of a day with few rows too


def judge_days(
    blessed: Blessed, subject: str, numeric: set[str], query: Query
) -> list[tuple[str | None, ...]]:
    """Rows of the table `DAYS`: period, then for each of `columns` how it leaves its bands.

    Whole periods of 24 hours from the window's start are judged; what is left at its end is not.

    Args:
        blessed: the bands.
        subject: name of the judged table.
        numeric: columns that hold numbers.
        query: runs SQL over the judged table.
    """
    measures = [*_whole(blessed), *_of_bands(blessed, numeric), *_of_categories(blessed)]
    facts = _by_period(blessed, subject, [m.sql for m in measures], query)
    verdicts: dict[str, dict[str, list[str]]] = {period: {} for period in facts}
    for period, (num_rows, *values) in facts.items():
        for measure, value in zip(measures, values, strict=True):
            if num_rows >= blessed.min_rows or measure.always:
                _note(verdicts[period], measure, value)
    for column, relation in blessed.relations.items():
        measure = _of_relation(column, relation)
        source = _with_right_values(subject, column, relation)
        for period, (num_rows, value) in _by_period(blessed, source, [measure.sql], query).items():
            if num_rows >= blessed.min_rows:
                _note(verdicts[period], measure, value)
    return [
        (period, *("; ".join(found[name]) if name in found else None for name in blessed.columns))
        for period, found in sorted(verdicts.items())
    ]


def _by_period(
    blessed: Blessed, source: str, statistics: Sequence[str], query: Query
) -> dict[str, list[float]]:
    """Number of rows and statistics of every whole period that has rows."""
    period, whole = "getvariable('window_start')", ""
    if blessed.time_column:
        moment = _q(blessed.time_column)
        period = f"time_bucket(INTERVAL 24 HOURS, {moment}, getvariable('window_start'))"
        whole = (
            f"WHERE {moment} >= getvariable('window_start') "
            f"AND {period} + INTERVAL 24 HOURS <= getvariable('window_end')"
        )
    selected = ", ".join(["count(*)", *statistics])
    rows = query(
        f"SELECT strftime({period}, '%Y-%m-%dT%H:%MZ'), {selected} FROM {source} {whole} GROUP BY 1"
        if blessed.time_column
        else f"SELECT strftime({period}, '%Y-%m-%dT%H:%MZ'), {selected} FROM {source}"
    )
    return {str(row[0]): list(row[1:]) for row in rows}


def _note(found: dict[str, list[str]], measure: _Measure, value: float | None) -> None:
    """Add the sentence of a statistic that leaves its band."""
    if value is None:
        return
    low, high = measure.band
    if (low is None or value >= low) and (high is None or value <= high):
        return
    text = f"{measure.fault}: {measure.told} {value:.4g}, blessed {_band_in_words(measure.band)}"
    found.setdefault(measure.column, []).append(text)


def _band_in_words(band: Band) -> str:
    low, high = band
    if high is None:
        return f"at least {low:.4g}"
    return f"at most {high:.4g}" if low is None else f"{low:.4g} to {high:.4g}"


def faults_in(verdict: str) -> list[str]:
    """Kinds of fault that a verdict of `judge_days` names."""
    return [part.split(": ", 1)[0] for part in verdict.split("; ")]


def statistic_sql(statistic: str, column: str, grid: Grid | None, known: Sequence[str]) -> str:
    """SQL aggregate that gives one statistic of a column."""
    name = _q(column)
    if statistic == "on_grid":
        assert grid is not None
        k = f"({name} - ({grid.offset!r})) / {grid.step!r}"
        moved = f"{name} <> {grid.offset!r}"  # zeros lie on every grid
        return f"avg((abs({k} - round({k})) < {GRID_TOLERANCE})::INT) FILTER ({moved})"
    if statistic == "unseen_share":
        values = ", ".join(_text(value) for value in known)
        return f"avg(({name}::VARCHAR NOT IN ({values}))::INT)"
    return {
        "null_share": f"1 - count({name}) / count(*)",
        "distinct": f"count(DISTINCT {name})",
        "top_share": f"list_max(map_values(histogram({name}::VARCHAR))) / count({name})",
        "low": f"quantile_cont({name}, 0.05)",
        "median": f"quantile_cont({name}, 0.5)",
        "high": f"quantile_cont({name}, 0.95)",
        "mean": f"avg({name})",
    }[statistic]


def _whole(blessed: Blessed) -> list[_Measure]:
    """Measures of the table as such."""
    found = [
        _Measure(ROWS, "number of rows", "count(*)", blessed.rows, FAULTS["rows"], always=True)
    ]
    if blessed.hours and blessed.time_column:
        sql = f"count(DISTINCT date_trunc('hour', {_q(blessed.time_column)}))"
        found.append(
            _Measure(HOURS, "hours with rows", sql, blessed.hours, FAULTS["hours"], always=True)
        )
    return found


def _of_bands(blessed: Blessed, numeric: set[str]) -> list[_Measure]:
    found = []
    for column, bands in blessed.bands.items():
        for statistic, band in bands.items():
            if statistic in NUMERIC_STATISTICS and column not in numeric:
                continue
            grid, known = blessed.grids.get(column), blessed.known.get(column, ())
            sql = statistic_sql(statistic, column, grid, known)
            found.append(_Measure(column, MEANING[statistic], sql, band, FAULTS[statistic]))
    return found


def _of_categories(blessed: Blessed) -> list[_Measure]:
    return [
        _Measure(
            column,
            f"share of {category!r}",
            f"avg(({_q(column)}::VARCHAR IS NOT DISTINCT FROM {_text(category)})::INT)",
            band,
            FAULTS["category"],
        )
        for column, categories in blessed.categories.items()
        for category, band in categories.items()
    ]


def _of_relation(column: str, relation: Relation) -> _Measure:
    gap = f"abs({_q(column)} - falaj_right) > {RELATION_TOLERANCE} * abs(falaj_right)"
    told = f"share of rows that contradict the blessed {column} of their {', '.join(relation.by)}"
    sql = f"avg(coalesce({gap}, false)::INT)"
    return _Measure(column, told, sql, (None, relation.max_share), FAULTS["relation"])


def _with_right_values(subject: str, column: str, relation: Relation) -> str:
    key = f"concat_ws(' ', {', '.join(_q(by) + '::VARCHAR' for by in relation.by)})"
    pairs = ", ".join(f"({_text(k)}, {v!r})" for k, v in relation.values.items())
    return (
        f"(SELECT * FROM {subject} LEFT JOIN (VALUES {pairs}) AS falaj_relation "
        f"(falaj_key, falaj_right) ON falaj_key = {key})"
    )


def _q(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(value: object) -> str:
    return "'" + str(value).replace("'", "''") + "'"
