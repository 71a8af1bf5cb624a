"""Signs that a feed is broken: a reason to mend the data, never to retrain on it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import NamedTuple

import numpy as np
from scipy.special import bdtrc

from tasks.evaluation.drift.statistics import MISSING_BIN, Histogram
from tasks.evaluation.drift.window import SECONDS_PER_DAY, Float64Array, Numbers, WindowColumns

MAX_MISSING_RISE = 0.2  # of a missing rate
MAX_UNSEEN_SHARE = 0.1  # of the rows, in categories that the reference does not have
LEVELS = np.linspace(0.05, 0.95, 19)
ALL_MISSING = 0.999
MIN_DAY_ROWS = 20
WHOLE_DAY_SHARE = 0.25  # of the median day's rows
MIN_STEP_DAYS = 4
SIDE_DAYS = 7  # of a step that are compared: a season moves little in so few
MIN_ABRUPTNESS = 1.5
MIN_FIT_RATIO = 3.0
MAX_NAMED = 3
MAX_USUAL_SHARE = 0.5
MAX_CHANCE = 1e-6
MAX_LUCK = 1e-3
MIN_GUESS_ROWS = 200  # known rows on either side of a change of unit
MIN_AGREEING = 3  # columns that change alike on one day, where none is declared to have a unit
MIN_LEVEL_DAYS = 5  # on either side of a change that lasts; a storm is over sooner
MIN_FROZEN_DAYS = 3  # in a row at one value; a public holiday and its neighbours are two


class UnitChange(NamedTuple):
    """A mistake of units: values arrive as `scale` times the value plus `offset`."""

    name: str
    scale: float
    offset: float = 0.0


UNIT_CHANGES = (
    UnitChange("Fahrenheit to Celsius", 5 / 9, -160 / 9),
    UnitChange("Celsius to Fahrenheit", 1.8, 32.0),
    UnitChange("Celsius to Kelvin", 1.0, 273.15),
    UnitChange("miles to kilometres", 1.609344),
    UnitChange("kilometres to miles", 1 / 1.609344),
    UnitChange("feet to metres", 0.3048),
    UnitChange("metres to feet", 1 / 0.3048),
    UnitChange("inches to millimetres", 25.4),
    UnitChange("millimetres to inches", 1 / 25.4),
    UnitChange("minutes or hours to the next smaller unit", 60.0),
    UnitChange("seconds or minutes to the next larger unit", 1 / 60),
    UnitChange("share to percent", 100.0),
    UnitChange("percent to share", 0.01),
    UnitChange("unit to thousandth", 1000.0),
    UnitChange("thousandth to unit", 0.001),
)


@dataclass(frozen=True)
class UnitGuess:
    """A column whose values look as if they came in another unit from one day on.

    Args:
        names: maps that fit, the best first.
        day: first day of the new unit.
        num_rows: known rows on the side that has fewer of them.
        told: the guess in words.
        lasts: another level from that day on, which no day before had and none left again.
    """

    names: tuple[str, ...]
    day: date
    num_rows: int
    told: str
    lasts: bool


@dataclass(frozen=True)
class DayStep:
    """The largest step of a column's median from one day to the next, and the values around it."""

    size: float
    day: date
    before: Float64Array
    after: Float64Array
    medians: tuple[Float64Array, Float64Array]
    """Of the days before and after it."""

    @property
    def lasts(self) -> bool:
        """Enough days on either side, and the medians of the two sides lie apart."""
        before, after = self.medians
        if min(len(before), len(after)) < MIN_LEVEL_DAYS:
            return False
        return bool(before.max() < after.min() or after.max() < before.min())


def find_missing(histogram: Histogram) -> str | None:
    """The missing rate jumped above what it was in any equally long stretch of the reference.

    Not only above its mean: a column such as a gust of wind is missing when there is none, so its
    rate comes and goes with the weather.
    """
    rows = int(histogram.current.sum())
    missing = int(histogram.current[:, MISSING_BIN].sum())
    current = missing / rows
    usual = _highest_missing_rate(histogram.reference, len(histogram.current))
    limit = usual + MAX_MISSING_RISE
    rose = current > limit and _chance(missing, rows, limit) <= MAX_LUCK
    all_gone = current >= ALL_MISSING > usual and _chance(missing, rows, usual) <= MAX_CHANCE
    if not rose and not all_gone:
        return None
    return (
        f"missing in {current:.1%} of the {rows:,} current rows; at most in {usual:.1%} in equally "
        f"many days of the reference (allowed rise {MAX_MISSING_RISE:.0%})"
    )


def find_unseen(histogram: Histogram) -> str | None:
    """Many rows have a category that the reference does not know."""
    rows = int(histogram.current.sum())
    share = MAX_UNSEEN_SHARE
    if histogram.unseen <= share or _chance(round(histogram.unseen * rows), rows, share) > MAX_LUCK:
        return None
    return (
        f"{histogram.unseen:.1%} of the {rows:,} current rows have categories that the reference "
        f"never has; allowed {share:.0%}"
    )


def _chance(hits: int, rows: int, share: float) -> float:
    """That at least so many of some rows are hit where a share of all is: few rows say little."""
    return float(bdtrc(hits - 1, rows, share)) if hits else 1.0


def _highest_missing_rate(counts: Float64Array, num_days: int) -> float:
    """Highest share of missing rows in `num_days` days in a row; in all, where there are fewer."""
    length = min(num_days, len(counts))
    missing, rows = (
        np.convolve(by_day, np.ones(length), "valid")
        for by_day in (counts[:, MISSING_BIN], counts.sum(axis=1))
    )
    return float((missing / rows).max())


def longest_frozen_run(window: WindowColumns, values: Float64Array) -> tuple[int, int]:
    """Days and first day of the longest run of neighbouring days with one and the same value.

    Args:
        window: days of the rows.
        values: numbers, or positions of categories, shape (rows,). NaN is left out, a day of NaN
            ends a run.
    """
    low, high = (ufunc.reduceat(values, window.starts) for ufunc in (np.fmin, np.fmax))
    same = low == high
    goes_on = same[1:] & same[:-1] & (low[1:] == low[:-1]) & (np.diff(window.dates) == 1)
    best = start = length = 0
    for day in range(window.num_days):
        length = length + 1 if day and goes_on[day - 1] else int(same[day])
        if length > best:
            best, start = length, day - length + 1
    return best, start


def find_frozen(
    reference: tuple[WindowColumns, Float64Array], current: tuple[WindowColumns, Float64Array]
) -> str | None:
    """The feed repeats one value for days, more than twice as many as ever in the reference.

    Dry days are no fault of a rain gauge: a value that most rows of the reference have, such as no
    rain, is no sign of anything, however long it stays.
    """
    (window, values), before = current, reference[1]
    num_days, first = longest_frozen_run(window, values)
    if num_days < MIN_FROZEN_DAYS:
        return None
    usual, _ = longest_frozen_run(*reference)
    end = window.starts[first + num_days] if first + num_days < window.num_days else len(values)
    run = values[window.starts[first] : end]
    run, known = run[~np.isnan(run)], before[~np.isnan(before)]
    share = float(np.mean(known == run[0])) if len(known) else 0.0
    if num_days <= 2 * usual or share > MAX_USUAL_SHARE or share ** len(run) > MAX_CHANCE:
        return None
    return (
        f"one value in all {len(run):,} known rows of {num_days} days "
        f"({_as_date(window.dates[first])} to {_as_date(window.dates[first + num_days - 1])}); the "
        f"reference has at most {usual} such days in a row"
    )


def largest_day_step(*parts: Numbers) -> DayStep | None:
    """The largest change of the median from one day to the next, of days with enough known rows.

    Args:
        parts: the column in windows, one after the other.
    """
    values, sizes = (
        np.concatenate(each) for each in zip(*(p.by_day() for p in parts), strict=True)
    )
    # A window's first and last day may hold a few hours, whose rows are of another kind.
    enough = max(MIN_DAY_ROWS, WHOLE_DAY_SHARE * np.median(sizes)) if len(sizes) else MIN_DAY_ROWS
    days = np.flatnonzero(sizes >= enough)
    if len(days) < MIN_STEP_DAYS:
        return None
    ends = np.cumsum(sizes)[days]
    rows = sizes[days]
    starts = ends - rows
    medians = (values[starts + (rows - 1) // 2] + values[starts + rows // 2]) / 2
    steps = np.abs(np.diff(medians))
    after = int(np.argmax(steps)) + 1

    def known(part: slice) -> Float64Array:
        bounds = zip(starts[part], ends[part], strict=True)
        return np.concatenate([values[start:end] for start, end in bounds])

    return DayStep(
        size=float(steps.max()),
        day=_as_date(np.concatenate([part.window.dates for part in parts])[days[after]]),
        before=known(slice(max(after - SIDE_DAYS, 0), after)),
        after=known(slice(after, after + SIDE_DAYS)),
        medians=(medians[max(after - SIDE_DAYS, 0) : after], medians[after : after + SIDE_DAYS]),
    )


def find_unit_change(reference: DayStep | None, current: DayStep | None) -> UnitGuess | None:
    """The values look as if they came in another unit from one day on.

    A season moves and stretches a distribution too, but slowly. A mistake of units moves it from
    one day to the next, and every quantile to just where a known map puts it. So both are asked:
    the largest step between two days is `MIN_ABRUPTNESS` times the largest of the whole reference,
    and a map takes the quantiles of the days before that step to those of the days after it, with
    a misfit `MIN_FIT_RATIO` times smaller than no map leaves. A column that is restless from day
    to day, such as delays, has large steps by nature, and is then left to the drift statistics.

    Args:
        reference: largest step of the reference window.
        current: largest step of the current window and as many days before it.
    """
    if reference is None or current is None:
        return None
    if current.size <= MIN_ABRUPTNESS * reference.size:
        return None
    before, after = np.quantile(current.before, LEVELS), np.quantile(current.after, LEVELS)
    limit = _misfit(before, after) / MIN_FIT_RATIO
    misfits = {c.name: _misfit(c.scale * before + c.offset, after) for c in UNIT_CHANGES}
    fitting = sorted((name for name in misfits if misfits[name] <= limit), key=misfits.__getitem__)
    if not fitting:  # nor where a misfit is NaN: values without a spread cannot be compared
        return None
    middle = len(LEVELS) // 2
    return UnitGuess(
        names=tuple(fitting),
        day=current.day,
        num_rows=min(len(current.before), len(current.after)),
        lasts=current.lasts,
        told=(
            f"looks converted from {' or '.join(fitting[:MAX_NAMED])} on {current.day}: the median "
            f"went from {before[middle]:.4g} to {after[middle]:.4g} and all quantiles fit, of "
            f"{len(current.before):,} rows before and {len(current.after):,} after; the largest "
            f"step between days is {current.size:.4g}, in the reference {reference.size:.4g}"
        ),
    )


def judge_guesses(
    guesses: Mapping[str, UnitGuess], with_unit: Collection[str]
) -> tuple[list[str], list[str]]:
    """Which guesses count as faults of the data, and which are only told, each in words.

    A count may grow by 1.6 on a busy day, and that is no mile. So a guess counts where enough rows
    stand behind it, and the column is declared to have a unit, or several columns agree and their
    new level lasts: what is made of one quantity agrees in every storm.

    Args:
        guesses: by column.
        with_unit: columns that are declared to have a unit.
    """
    faults, remarks = [], []
    sound = {name: guess for name, guess in guesses.items() if guess.num_rows >= MIN_GUESS_ROWS}
    for name, guess in guesses.items():
        agreeing = sum(
            other.lasts and other.day == guess.day and bool(set(other.names) & set(guess.names))
            for other in sound.values()
        )
        if name not in sound:
            reason = f"{guess.num_rows:,} rows are too few to tell, expected {MIN_GUESS_ROWS}"
        elif name in with_unit or (guess.lasts and agreeing >= MIN_AGREEING):
            faults.append(f"{name}: {guess.told}")
            continue
        else:
            reason = "no suite declares a unit for it, nor went two others to a lasting new level"
        remarks.append(f"{name}: {guess.told}. It counts as no fault: {reason}")
    return faults, remarks


def _misfit(expected: Float64Array, seen: Float64Array) -> float:
    """Mean distance of quantiles in interquartile ranges of the expected; NaN without a range."""
    spread = np.interp(0.75, LEVELS, expected) - np.interp(0.25, LEVELS, expected)
    return float(np.abs(seen - expected).mean() / spread) if spread > 0 else np.nan


def _as_date(days_since_1970: int) -> date:
    return datetime.fromtimestamp(int(days_since_1970) * SECONDS_PER_DAY, UTC).date()
