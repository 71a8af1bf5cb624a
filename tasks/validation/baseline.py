"""What the days of a baseline window were like: bands for statistics of a day, column by column.

A baseline file is made by `profiling`, reviewed by a person and kept beside the hand-written suite.
Here is its form, and the SQL that compares a day of rows with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from pydantic import Field, PositiveInt, model_validator

from tasks.contracts.base import TimeWindow
from tasks.kernel.values import Described

DAYS = "baseline_days"
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
Band = tuple[float | None, float | None]
Query = Callable[[str], list[tuple[Any, ...]]]
LEVELS: tuple[Statistic, ...] = ("low", "median", "high", "mean")
GRID_TOLERANCE = 0.02
RELATION_TOLERANCE = 0.01
ROWS, HOURS = "rows", "hours"


class _Kind(NamedTuple):
    """A statistic: in words, the fault it points to, and its SQL over the column `{c}`."""

    words: str
    fault: str
    sql: str = ""


_SCALE = "change of unit or scale"
_KINDS: dict[Statistic, _Kind] = {
    "null_share": _Kind("share of nulls", "null burst", "1 - count({c}) / count(*)"),
    "distinct": _Kind(
        "number of different values", "constant, frozen or rounded column", "count(DISTINCT {c})"
    ),
    "top_share": _Kind(
        "share of the most frequent value",
        "constant or frozen column",
        "list_max(map_values(histogram({c}::VARCHAR))) / count({c})",
    ),
    "low": _Kind("5th percentile", _SCALE, "quantile_cont({c}, 0.05)"),
    "median": _Kind("median", _SCALE, "quantile_cont({c}, 0.5)"),
    "high": _Kind("95th percentile", _SCALE, "quantile_cont({c}, 0.95)"),
    "mean": _Kind("mean", _SCALE, "avg({c})"),
    "on_grid": _Kind(
        "share of values on the grid of the readings", "change of unit, mixed units or rounding"
    ),
    "unseen_share": _Kind("share of values that the baseline never had", "new category"),
}


def quoted(name: str) -> str:
    """A column or table name that no character of it can end."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: object) -> str:
    """A value: numbers and truth values plainly, moments in UTC, all else as text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime):
        return f"TIMESTAMPTZ '{value.astimezone(UTC).isoformat()}'"
    return "'" + str(value).replace("'", "''") + "'"


class Grid(Described):
    """Readings are `offset + k * step` for whole k, as of an instrument that rounds."""

    step: float = Field(gt=0)
    offset: float = 0.0


class Relation(Described):
    """A column that others decide, such as a distance by its two ends, with the known values."""

    by: tuple[str, ...] = Field(min_length=1, description="Columns that decide it.")
    values: dict[str, float] = Field(min_length=1)
    """Their values with a blank between, to the value of the column."""
    max_share: float = Field(ge=0, le=1, description="Share of a day's rows that may contradict.")


class Baseline(Described):
    """Bands from one clean window, and where they come from."""

    suite: str
    window: TimeWindow
    table_sha256: str = Field(description="Digest of the table that gave the bands.")
    num_rows: PositiveInt
    num_periods: PositiveInt = Field(description="Days that gave the bands; 1 for a static table.")
    margins: str = Field(min_length=1, description="How the bands were widened, in words.")
    reviewed: str = Field(min_length=1, description="When and how a person reviewed the file.")
    time_column: str | None
    """Places a row in a day; none: the table as a whole."""
    min_rows: PositiveInt = Field(default=1, description="Days with fewer rows judge `rows` alone.")
    rows: Band
    hours: Band | None = None
    """Hours of a day, of 24, in which there is a row."""
    bands: dict[str, dict[Statistic, Band]]
    grids: dict[str, Grid] = Field(default={})
    categories: dict[str, dict[str, tuple[float, float]]] = Field(default={})
    """Column to category to the share of a day's rows that has it."""
    known: dict[str, tuple[str, ...]] = Field(default={})
    """Column to every value it had; the others are `unseen`."""
    relations: dict[str, Relation] = Field(default={})

    @model_validator(mode="after")
    def _statistics_have_what_they_need(self) -> Baseline:
        for column, bands in self.bands.items():
            if "on_grid" in bands and column not in self.grids:
                raise ValueError(f"column {column} has a band for its grid and no grid")
            if "unseen_share" in bands and column not in self.known:
                raise ValueError(f"column {column} has a band for unseen values and no known ones")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the table of days that hold results."""
        extra = [ROWS, *([HOURS] if self.hours else [])]
        return tuple(dict.fromkeys([*extra, *self.bands, *self.categories, *self.relations]))

    @property
    def needed_columns(self) -> set[str]:
        """Columns that the judged table must have."""
        by = {name for relation in self.relations.values() for name in relation.by}
        time = {self.time_column} if self.time_column else set()
        return {*self.bands, *self.categories, *self.relations, *by, *time}


class _Measure(NamedTuple):
    """One statistic of a day: its SQL, its band, and whose result it goes into."""

    column: str
    words: str
    sql: str
    band: Band
    fault: str
    always: bool = False  # asked of a day with few rows too


def judge_days(
    baseline: Baseline, subject: str, numeric: set[str], query: Query
) -> list[tuple[str | None, ...]]:
    """Rows of the table `DAYS`: period, then for each of `columns` how it leaves its bands.

    Whole periods of 24 hours from the window's start are judged; what is left at its end is not.

    Args:
        baseline: the bands.
        subject: name of the judged table.
        numeric: columns that hold numbers.
        query: runs SQL over the judged table.
    """
    asked = [(subject, _measures(baseline, numeric))]
    for column, relation in baseline.relations.items():
        pairs = ", ".join(f"({literal(k)}, {v!r})" for k, v in relation.values.items())
        source = (
            f"(SELECT * FROM {subject} LEFT JOIN (VALUES {pairs}) AS falaj_relation "
            f"(falaj_key, falaj_right) ON falaj_key = {joined(relation.by)})"
        )
        asked.append((source, [_of_relation(column, relation)]))
    results: dict[str, dict[str, list[str]]] = {}
    for source, measures in asked:
        facts = query(by_day(baseline.time_column, source, [m.sql for m in measures]))
        for period, num_rows, *values in facts:
            found = results.setdefault(period, {})
            for measure, value in zip(measures, values, strict=True):
                if num_rows >= baseline.min_rows or measure.always:
                    _note(found, measure, value)
    return [
        (period, *("; ".join(found[name]) if name in found else None for name in baseline.columns))
        for period, found in sorted(results.items())
    ]


def by_day(time_column: str | None, source: str, statistics: Sequence[str]) -> str:
    """SQL of period, rows and statistics, for each whole day; of the table whole without a time."""
    selected = ", ".join(["count(*)", *statistics])
    start, shown = "getvariable('window_start')", "'%Y-%m-%dT%H:%MZ'"
    if not time_column:
        return f"SELECT strftime({start}, {shown}), {selected} FROM {source}"
    moment = quoted(time_column)
    period = f"time_bucket(INTERVAL 24 HOURS, {moment}, {start})"
    return (
        f"SELECT strftime({period}, {shown}), {selected} FROM {source} WHERE {moment} >= {start} "
        f"AND {period} + INTERVAL 24 HOURS <= getvariable('window_end') GROUP BY 1 ORDER BY 1"
    )


def _note(found: dict[str, list[str]], measure: _Measure, value: float | None) -> None:
    """Add the sentence of a statistic that leaves its band."""
    low, high = measure.band
    if value is None or ((low is None or value >= low) and (high is None or value <= high)):
        return
    sides = [*([f"at least {low:.4g}"] if low is not None else [])]
    sides += [f"at most {high:.4g}"] if high is not None else []
    text = f"{measure.fault}: {measure.words} {value:.4g}, baseline {' and '.join(sides)}"
    found.setdefault(measure.column, []).append(text)


def faults_in(result: str) -> list[str]:
    """Kinds of fault that a result of `judge_days` names."""
    return [part.split(": ", 1)[0] for part in result.split("; ")]


def statistic_sql(
    statistic: Statistic, column: str, grid: Grid | None, known: Sequence[str]
) -> str:
    """SQL aggregate that gives one statistic of a column."""
    name = quoted(column)
    if statistic == "on_grid":
        assert grid is not None
        k = f"({name} - ({grid.offset!r})) / {grid.step!r}"
        moved = f"{name} <> {grid.offset!r}"  # zeros lie on every grid
        return f"avg((abs({k} - round({k})) < {GRID_TOLERANCE})::INT) FILTER ({moved})"
    if statistic == "unseen_share":
        return f"avg(({name}::VARCHAR NOT IN ({', '.join(map(literal, known))}))::INT)"
    return _KINDS[statistic].sql.format(c=name)


def category_sql(column: str, category: str) -> str:
    """SQL aggregate that gives the share of rows that have a category."""
    return f"avg(({quoted(column)}::VARCHAR IS NOT DISTINCT FROM {literal(category)})::INT)"


def hours_sql(time_column: str) -> str:
    """SQL aggregate that gives the number of hours with rows."""
    return f"count(DISTINCT date_trunc('hour', {quoted(time_column)}))"


def _measures(baseline: Baseline, numeric: set[str]) -> list[_Measure]:
    """What is asked of the table as it is."""
    lost = "truncated or doubled file"
    found = [_Measure(ROWS, "number of rows", "count(*)", baseline.rows, lost, always=True)]
    if baseline.hours and baseline.time_column:
        sql = hours_sql(baseline.time_column)
        words = "hours with rows"
        found.append(_Measure(HOURS, words, sql, baseline.hours, "missing hours", always=True))
    for column, bands in baseline.bands.items():
        grid, known = baseline.grids.get(column), baseline.known.get(column, ())
        found += [
            _Measure(
                column,
                _KINDS[statistic].words,
                statistic_sql(statistic, column, grid, known),
                band,
                _KINDS[statistic].fault,
            )
            for statistic, band in bands.items()
            if column in numeric or statistic not in (*LEVELS, "on_grid")
        ]
    swapped = "missing or swapped categories"
    return found + [
        _Measure(column, f"share of {category!r}", category_sql(column, category), band, swapped)
        for column, categories in baseline.categories.items()
        for category, band in categories.items()
    ]


def _of_relation(column: str, relation: Relation) -> _Measure:
    gap = f"abs({quoted(column)} - falaj_right) > {RELATION_TOLERANCE} * abs(falaj_right)"
    return _Measure(
        column,
        f"share of rows that contradict the known {column} of their {', '.join(relation.by)}",
        f"avg(coalesce({gap}, false)::INT)",
        (None, relation.max_share),
        "mixed units, or rows shifted against each other",
    )


def joined(columns: Sequence[str]) -> str:
    """SQL of the values of some columns, with a blank between."""
    return f"concat_ws(' ', {', '.join(quoted(name) + '::VARCHAR' for name in columns)})"
