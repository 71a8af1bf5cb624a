"""A rule that no suite has to write: no number is absurdly large against the baseline window."""

from __future__ import annotations

from collections.abc import Collection

from tasks.contracts.base import TimeWindow
from tasks.validation.sql import literal, quoted
from tasks.validation.suites import SUBJECT, Rule, Suite

MAGNITUDES = "baseline_magnitudes"
MOMENT = "event_timestamp"
USUAL = 0.99
MOST_TIMES = 1000
MIN_VALUES = 100


def with_magnitudes(suite: Suite, baseline: TimeWindow, spared: Collection[str]) -> Suite:
    """The suite of a feature table with history, and that rule where it has columns to judge.

    What numbers are usually like is the 99th percentile of those of the baseline that are not
    zero, by amount. A column with fewer than `MIN_VALUES` of them is not judged.

    Args:
        suite: as the feature repository says it.
        baseline: a clean window; its rows are in the table where it was ever refreshed.
        spared: columns that are no measurements, or may have any magnitude.
    """
    numbers = [*suite.columns.get("number", ()), *suite.columns.get("integer", ())]
    judged = [name for name in numbers if name not in spared]
    if not judged or suite.kind_of(MOMENT) != "timestamp" or MAGNITUDES in suite.aggregates:
        return suite
    each = " UNION ALL ".join(_magnitude(name, baseline) for name in judged)
    rule = Rule(
        type="expect_column_values_to_be_between",
        table=MAGNITUDES,
        kwargs={"column": "times_the_usual", "max_value": MOST_TIMES},
        shows=("feature", "largest", "usual", "baseline_values"),
        says=f"no number of the window is more than {MOST_TIMES:,} times as large as those of the "
        "baseline usually are; mend it, or name the column among `unbounded` of the feature table",
        fault="change of unit or scale, or a denominator near zero",
    )
    query = (
        f"SELECT *, largest / usual AS times_the_usual FROM ({each}) WHERE usual > 0 "
        f"AND largest IS NOT NULL AND baseline_values >= {MIN_VALUES}"
    )
    aggregates = {**suite.aggregates, MAGNITUDES: query}
    rules = (*suite.expectations, rule)
    return suite.model_copy(update={"aggregates": aggregates, "expectations": rules})


def _magnitude(name: str, baseline: TimeWindow) -> str:
    column = quoted(name)
    known = f"isfinite({column}::DOUBLE) AND {column} <> 0"
    before, after = literal(baseline.start), literal(baseline.end)
    usual = f"{known} AND {MOMENT} >= {before} AND {MOMENT} < {after}"
    start, end = "getvariable('window_start')", "getvariable('window_end')"
    inside = f"{known} AND {MOMENT} >= {start} AND {MOMENT} < {end}"
    return (
        f"SELECT {literal(name)} AS feature, "
        f"max(abs({column}::DOUBLE)) FILTER ({inside}) AS largest, "
        f"quantile_cont(abs({column}::DOUBLE), {USUAL}) FILTER ({usual}) AS usual, "
        f"count(*) FILTER ({usual}) AS baseline_values FROM {SUBJECT}"
    )
