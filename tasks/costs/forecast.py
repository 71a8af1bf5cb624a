"""Forecasts from days: what grows or is spent a day, and when something is full.

Intervals are of the block bootstrap over days, see `tasks.stats.bootstrap`: they say how far the
mean of such days varies, and nothing of a change that no day has shown.
"""

import calendar
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

import numpy as np

from tasks.stats.bootstrap import Float64Array, draw_days, interval

MIN_DAYS = 7
"""Complete days; with fewer nothing is forecast."""
MOST_DAYS = 60
BLOCK_DAYS, REPLICATES, SEED = 7, 2000, 0


class Estimate(NamedTuple):
    """A forecast with its 95 % interval."""

    value: float
    low: float
    high: float


def by_day(amounts: Iterable[tuple[datetime, float]], now: datetime) -> Float64Array:
    """Sums of the complete UTC days from the first one with an amount, the newest `MOST_DAYS`.

    A day without any amount is 0; the day of `now` is not complete.
    """
    today = now.date()
    found = [((today - moment.date()).days, amount) for moment, amount in amounts]
    num_days = min(MOST_DAYS, max((age for age, _ in found), default=0))
    sums = np.zeros(num_days)
    for age, amount in found:
        if 1 <= age <= num_days:
            sums[-age] += amount
    return sums


def mean_a_day(days: Float64Array) -> Estimate | None:
    """Mean of the days; None where there are fewer than `MIN_DAYS`."""
    return _ratio(days, np.ones(len(days)))


def _ratio(amounts: Float64Array, numbers: Float64Array) -> Estimate | None:
    """Ratio of the sums of both over the days; None with too few days, or where nothing was."""
    if len(numbers) < MIN_DAYS or not numbers.sum():
        return None
    drawn = draw_days(len(numbers), BLOCK_DAYS, REPLICATES, np.random.default_rng(SEED))
    with np.errstate(invalid="ignore", divide="ignore"):
        replicates = (drawn @ amounts) / (drawn @ numbers)
    ratio = float(amounts.sum() / numbers.sum())
    return Estimate(ratio, *interval(ratio, replicates, (0.0, np.inf)))


def days_until_full(growth: Float64Array, free: float) -> Estimate | None:
    """Days until `free` bytes are used up; the upper end is infinite where no growth is likely.

    Args:
        growth: bytes of each day.
        free: bytes.
    """
    a_day = mean_a_day(growth)
    if a_day is None:
        return None
    return Estimate(*(free / rate if rate > 0 else np.inf for rate in (a_day[0], *a_day[:0:-1])))


def month_cost(amounts: list[tuple[datetime, float]], now: datetime) -> Estimate | None:
    """Cost of the UTC calendar month of `now`: so far, and the rest at the mean of the days."""
    a_day = mean_a_day(by_day(amounts, now))
    if a_day is None:
        return None
    start = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    left = timedelta(days=calendar.monthrange(now.year, now.month)[1]) - (now - start)
    so_far = sum(amount for moment, amount in amounts if moment >= start)
    return Estimate(*(so_far + rate * (left / timedelta(days=1)) for rate in a_day))


def mean_wait(waits: list[tuple[datetime, float]], now: datetime) -> Estimate | None:
    """Mean seconds that runs waited, by moment of their start; None with too few complete days.

    The interval is of the ratio of two sums over days: seconds, and runs.
    """
    return _ratio(by_day(waits, now), by_day([(moment, 1.0) for moment, _ in waits], now))
