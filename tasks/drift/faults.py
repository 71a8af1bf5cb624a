"""Signs that a feed is broken: a reason to mend the data, never to retrain on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from itertools import pairwise, permutations

import numpy as np

from tasks.drift.config import DriftConfig, UnitChange
from tasks.drift.histograms import Histogram
from tasks.drift.statistics import Change
from tasks.drift.window import SECONDS_PER_DAY, Float64Array, WindowColumns

LEVELS = np.linspace(0.05, 0.95, 19)
MIN_QUANTILE_ROWS = 200
MIN_WINDOWS = 3
MIN_ABRUPTNESS = 1.0
MIN_FIT_RATIO = 4.0
MAX_CHANCE = 1e-6


@dataclass(frozen=True)
class FrozenRun:
    """Days in a row in which all known values are one and the same."""

    num_days: int = 0
    num_rows: int = 0
    value: float = np.nan
    first: date | None = None
    last: date | None = None


def find_missing(change: Change, config: DriftConfig) -> str | None:
    """The missing rate jumped."""
    rise = change.missing_current - change.missing_reference
    if rise <= config.max_missing_rise:
        return None
    return (
        f"missing in {change.missing_current:.1%} of the current rows, "
        f"{change.missing_reference:.1%} of the reference; allowed rise "
        f"{config.max_missing_rise:.0%}"
    )


def find_unseen(histogram: Histogram, config: DriftConfig) -> str | None:
    """Many rows have a category that the reference does not know."""
    if histogram.unseen <= config.max_unseen_share:
        return None
    return (
        f"{histogram.unseen:.1%} of the current rows have categories that the reference never has; "
        f"allowed {config.max_unseen_share:.0%}"
    )


def longest_frozen_run(window: WindowColumns, values: Float64Array) -> FrozenRun:
    """The longest run of neighbouring days with one value; NaN is left out, a day of NaN ends it.

    Args:
        window: days of the rows.
        values: numbers, or positions of categories with NaN for missing, shape (rows,).
    """
    low, high = (ufunc.reduceat(values, window.starts) for ufunc in (np.fmin, np.fmax))
    same = low == high
    goes_on = same[1:] & same[:-1] & (low[1:] == low[:-1]) & (np.diff(window.dates) == 1)
    best, start = FrozenRun(), 0
    ends = np.append(window.starts[1:], window.num_rows)
    for day in range(window.num_days):
        if day == 0 or not goes_on[day - 1]:
            start = day
        length = day - start + 1
        if same[day] and length > best.num_days:
            rows = values[window.starts[start] : ends[day]]
            best = FrozenRun(
                num_days=length,
                num_rows=int(np.count_nonzero(~np.isnan(rows))),
                value=float(low[day]),
                first=_as_date(window.dates[start]),
                last=_as_date(window.dates[day]),
            )
    return best


def find_frozen(
    reference: FrozenRun, current: FrozenRun, usual_share: float, config: DriftConfig
) -> str | None:
    """The feed repeats one value for days.

    Args:
        reference: longest run of the reference: dry days are no fault of a rain gauge.
        current: longest run of the current window.
        usual_share: share of the reference's rows in the same bin as the repeated value. Rows of
            a value that is nearly always there are no sign of anything.
        config: least length.
    """
    if current.num_days < max(config.min_frozen_days, 2 * reference.num_days + 1):
        return None
    if usual_share**current.num_rows > MAX_CHANCE:
        return None
    return (
        f"one value in all {current.num_rows:,} known rows of {current.num_days} days "
        f"({current.first} to {current.last}); the reference has at most {reference.num_days} such "
        "days in a row"
    )


def find_unit_change(
    reference: Sequence[Float64Array],
    lead_in: Float64Array,
    current: Float64Array,
    changes: Sequence[UnitChange],
) -> str | None:
    """The values look as if they came in another unit from one day to the next.

    A season moves and stretches a distribution too, but slowly, and a mistake of units moves every
    quantile to just where one of a few known maps puts it. So a change is called only where three
    things hold for the quantile function, in interquartile ranges: the current window is further
    from the one before than neighbouring windows of the reference ever are, by `MIN_ABRUPTNESS`;
    a known map brings it within what neighbours differ by; and it fits `MIN_FIT_RATIO` times better
    than the values as they are.

    Args:
        reference: known values of neighbouring windows of the reference, each about as long as the
            current window.
        lead_in: known values of the days before the current window.
        current: known values now.
        changes: known maps.
    """
    if min(len(lead_in), len(current)) < MIN_QUANTILE_ROWS:
        return None
    windows = [np.quantile(values, LEVELS) for values in reference if len(values) >= MIN_QUANTILE_ROWS]
    if len(windows) < MIN_WINDOWS:
        return None
    then, now = np.quantile(lead_in, LEVELS), np.quantile(current, LEVELS)
    unchanged = _misfit(then, now)
    if unchanged <= MIN_ABRUPTNESS * max(_misfit(a, b) for a, b in permutations(windows, 2)):
        return None
    misfits = [_misfit(change.scale * then + change.offset, now) for change in changes]
    usual = max(_misfit(a, b) for a, b in pairwise(windows))
    if min(misfits, default=np.inf) > min(usual, unchanged / MIN_FIT_RATIO):
        return None
    middle = len(LEVELS) // 2
    return (
        f"the values look converted from {changes[int(np.argmin(misfits))].name}: the median went "
        f"from {then[middle]:.4g} to {now[middle]:.4g}, and all quantiles fit that map"
    )


def _misfit(expected: Float64Array, seen: Float64Array) -> float:
    """Mean distance of quantiles in interquartile ranges of the expected; infinite without one."""
    spread = np.interp(0.75, LEVELS, expected) - np.interp(0.25, LEVELS, expected)
    return float(np.abs(seen - expected).mean() / spread) if spread > 0 else np.inf


def _as_date(days_since_1970: int) -> date:
    return datetime.fromtimestamp(int(days_since_1970) * SECONDS_PER_DAY, UTC).date()
