"""When a statistic is worth an alert. A state is told when it begins, not on every day it lasts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from tasks.contracts.base import TimeWindow
from tasks.evaluation.monitoring.alerts import AlertEvent, alert
from tasks.evaluation.monitoring.config import MonitoringConfig
from tasks.evaluation.monitoring.drift import WindowDrift
from tasks.evaluation.monitoring.statistics import DAY, FeatureDay, ViewDay

MOST_NAMED = 3


def volume_alerts(
    view: str, usual: Sequence[ViewDay], days: Sequence[ViewDay], config: MonitoringConfig
) -> Iterator[AlertEvent]:
    """Days with far fewer or far more rows than any of the baseline, its empty days included."""
    rows = sorted(day.num_rows for day in usual)
    low, high = rows[0] / config.volume_factor, rows[-1] * config.volume_factor
    before = False
    for day in days:
        odd = not low <= day.num_rows <= high
        if odd and not before:
            bound = low if day.num_rows < low else high
            yield alert(
                "volume", view, None, _day(day.start),
                "warning" if day.num_rows else "critical", day.num_rows, bound,
                f"{view} has {day.num_rows:,} rows on {day.start:%Y-%m-%d}; the days of the "
                f"baseline have {rows[0]:,} to {rows[-1]:,}",
            )  # fmt: skip
        before = odd


def freshness_alerts(
    view: str, usual: Sequence[ViewDay], days: Sequence[ViewDay], config: MonitoringConfig
) -> Iterator[AlertEvent]:
    """Ends of days at which the newest row is older than it ever was in the baseline."""
    oldest = max(day.age_hours for day in usual)
    bound = oldest + config.spare_age_h
    before = False
    for day in days:
        stale = day.age_hours > bound
        if stale and not before:
            has_values = math.isfinite(day.age_hours)
            age = f"is {day.age_hours:.0f} h old" if has_values else "has had no value yet"
            yield alert(
                "freshness", view, None, _day(day.start), "critical", day.age_hours, bound,
                f"{view} {age} at {day.start + DAY:%Y-%m-%d %H:%MZ}; in the baseline it was at "
                f"most {oldest:.0f} h",
            )  # fmt: skip
        before = stale


def null_alerts(
    view: str, usual: Sequence[FeatureDay], days: Sequence[FeatureDay], config: MonitoringConfig
) -> Iterator[AlertEvent]:
    """Days on which features are missing more often than on any day of the baseline: one a day."""
    highest: dict[str, float] = defaultdict(float)
    for day in usual:
        highest[day.feature] = max(highest[day.feature], day.null_rate)
    by_day: dict[datetime, list[FeatureDay]] = defaultdict(list)
    for day in days:
        if day.null_rate > min(highest[day.feature] + config.max_null_rise, 0.999):
            by_day[day.start].append(day)
    for start in sorted(by_day):
        known = {day.feature for day in by_day.get(start - DAY, [])}
        fresh = [day for day in by_day[start] if day.feature not in known]
        if not fresh or highest_all_null(fresh, highest):
            continue
        worst = max(fresh, key=lambda day: day.null_rate)
        bound = highest[worst.feature] + config.max_null_rise
        yield alert(
            "null_rate", view, worst.feature, _day(start), "warning", worst.null_rate, bound,
            f"{_named([day.feature for day in fresh])} of {view} missing in "
            f"{worst.null_rate:.0%} of the {worst.num_rows:,} rows of {start:%Y-%m-%d}; on a "
            f"day of the baseline in at most {highest[worst.feature]:.0%}",
        )  # fmt: skip


def highest_all_null(days: Sequence[FeatureDay], highest: dict[str, float]) -> bool:
    """True where every one of these features was wholly missing on some day of the baseline."""
    return all(highest[day.feature] >= 1 for day in days)


def drift_alerts(
    view: str, window: TimeWindow, drift: Sequence[WindowDrift], config: MonitoringConfig
) -> Iterator[AlertEvent]:
    """Windows in which a view begins to drift, with the features that drift most: one a view."""
    by_end: dict[int, list[WindowDrift]] = defaultdict(list)
    for found in drift:
        by_end[found.end_day].append(found)
    before: bool | None = None
    for end in sorted(by_end):
        drifted = sorted((d for d in by_end[end] if d.drifted), key=lambda d: -d.psi)
        if drifted and before is False:
            last = window.start + timedelta(days=end)
            span = TimeWindow(start=last - timedelta(days=config.window_days), end=last)
            worst = drifted[0]
            yield alert(
                "drift", view, worst.feature, span, "warning", worst.psi, worst.bound,
                f"{_named([d.feature for d in drifted])} of {view} drifted in the "
                f"{config.window_days} days to {last:%Y-%m-%d}: PSI {worst.psi:.2f} above "
                f"{worst.bound:.2f}, KS {worst.ks:.2f}",
            )  # fmt: skip
        before = bool(drifted)


def _day(start: datetime) -> TimeWindow:
    return TimeWindow(start=start, end=start + DAY)


def _named(features: Sequence[str]) -> str:
    shown = ", ".join(features[:MOST_NAMED])
    more = len(features) - MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
