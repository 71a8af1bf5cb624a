"""What left the baseline, as events: volume, freshness, nulls and drift of each view.

Events are JSON lines under the state folder, appended, never changed. An event's id is a digest of
what it is about, so that monitoring a window again adds nothing.

A PSI needs something to compare with: even two clean weeks differ. So each window of the baseline
is compared with the rest of it, and the largest such PSI over all features and windows of a view,
times a factor, is the least that counts. The largest over all features corrects for their number.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from tasks.contracts.base import TimeWindow
from tasks.evaluation.monitoring.statistics import DAY, Binned, FeatureDay, Floats, ViewDay
from tasks.kernel.errors import refused_writes_explained
from tasks.kernel.files import append_lines, make_folder
from tasks.stats.shift import distance, psi, shares

FILE = Path("monitoring") / "alerts.jsonl"
NOISE_FACTOR = 2.0
"""Times the PSI that windows of the baseline reach against the rest of it."""
MIN_PSI, MIN_KS = 1.0, 0.2
"""Below either there is no drift, whatever the noise of the baseline."""
MAX_NULL_RISE = 0.2
"""Null rate above the baseline's highest day."""
VOLUME_FACTOR = 1.5
"""Rows of a day, times or through the baseline's extremes."""
SPARE_AGE_H = 3.0
"""Hours that the newest row may be older than in the baseline."""
MOST_GROUPS = 20
MOST_NAMED = 3
Kind = Literal["freshness", "null_rate", "drift", "volume"]
Severity = Literal["warning", "critical"]
Day = TypeVar("Day")


@dataclass(frozen=True)
class WindowDrift:
    """One feature in one sliding window.

    Args:
        feature: its name.
        end_day: day after the window, counted from the start of the refreshed window.
        psi: population stability index against the baseline, nulls and zeros as bins of their own.
        ks: Kolmogorov-Smirnov distance over the bins.
        bound: PSI that would be drift.
    """

    feature: str
    end_day: int
    psi: float
    ks: float
    bound: float

    @property
    def drifted(self) -> bool:
        """Whether it left the baseline by more than noise."""
        return self.psi > self.bound and self.ks > MIN_KS


def baseline_noise(counts: Floats, window_days: int) -> float:
    """Largest PSI of windows of the baseline, end to end, against the rest of it.

    Args:
        counts: rows by day and bin, shape (days, bins).
        window_days: days of a window.

    Returns:
        Infinity where the baseline holds fewer than two windows: nothing can be judged then.
    """
    starts = range(0, len(counts) - window_days + 1, window_days)
    if len(starts) < 2:
        return float("inf")
    total = counts.sum(axis=0)
    windows = [counts[start : start + window_days].sum(axis=0) for start in starts]
    return max(float(psi(total - part, part)) for part in windows)


def measure_drift(
    features: Sequence[Binned], baseline_days: tuple[int, int], ends: Sequence[int], length: int
) -> list[WindowDrift]:
    """Drift of every feature in each window of `length` days that ends with one of `ends`.

    Args:
        features: binned features of one view.
        baseline_days: first day and day after the last, counted from the refreshed window's start.
        ends: days after the windows.
        length: days of a window.
    """
    references = [_days_of(f, *baseline_days) for f in features]
    noise = max((baseline_noise(c, length) for c in references), default=float("inf"))
    bound = max(MIN_PSI, NOISE_FACTOR * noise)
    found = []
    for end in ends:
        for feature, reference in zip(features, references, strict=True):
            current = _days_of(feature, end - length, end).sum(axis=0)
            total = reference.sum(axis=0)
            if current.sum() and total.sum():
                ks = float(distance(shares(current) - shares(total), ordered=True))
                index = float(psi(total, current))
                found.append(WindowDrift(feature.feature, end, index, ks, bound))
    return found


def _days_of(feature: Binned, first: int, after: int) -> Floats:
    return feature.counts[(feature.days >= first) & (feature.days < after)]


class AlertEvent(BaseModel):
    """One thing that somebody should know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(min_length=16, description="Digest of kind, view, feature and window.")
    time: datetime = Field(description="End of the window it speaks of, UTC.")
    kind: Kind
    view: str
    feature: str | None = Field(description="None where the view as a whole is meant.")
    window: TimeWindow
    severity: Severity
    value: float | None = Field(description="What was seen; None where there is nothing to see.")
    bound: float
    sentence: str


def alert(
    kind: Kind,
    view: str,
    feature: str | None,
    window: TimeWindow,
    severity: Severity,
    value: float,
    bound: float,
    sentence: str,
) -> AlertEvent:
    """An event with the id that follows from what it is about."""
    about = "\n".join([kind, view, feature or "", window.start.isoformat(), window.end.isoformat()])
    return AlertEvent(
        id=hashlib.sha256(about.encode()).hexdigest()[:32],
        time=window.end,
        kind=kind,
        view=view,
        feature=feature,
        window=window,
        severity=severity,
        value=value if math.isfinite(value) else None,
        bound=bound,
        sentence=sentence,
    )


def day_alerts(
    view: str, usual: Sequence[ViewDay], days: Sequence[ViewDay]
) -> Iterator[AlertEvent]:
    """First days with far fewer or more rows than the baseline's, or with older newest rows."""
    rows = sorted(day.num_rows for day in usual)  # empty days included
    low, high = rows[0] / VOLUME_FACTOR, rows[-1] * VOLUME_FACTOR
    for day in _beginnings(days, lambda day: not low <= day.num_rows <= high):
        yield alert(
            "volume", view, None, _day(day.start), "warning" if day.num_rows else "critical",
            day.num_rows, low if day.num_rows < low else high,
            f"{view} has {day.num_rows:,} rows on {day.start:%Y-%m-%d}; the days of the "
            f"baseline have {rows[0]:,} to {rows[-1]:,}",
        )  # fmt: skip
    oldest = max(day.age_hours for day in usual)
    bound = oldest + SPARE_AGE_H
    for day in _beginnings(days, lambda day: day.age_hours > bound):
        known = math.isfinite(day.age_hours)
        age = f"is {day.age_hours:.0f} h old" if known else "has had no value yet"
        yield alert(
            "freshness", view, None, _day(day.start), "critical", day.age_hours, bound,
            f"{view} {age} at {day.start + DAY:%Y-%m-%d %H:%MZ}; in the baseline it was at "
            f"most {oldest:.0f} h",
        )  # fmt: skip


def _beginnings(days: Sequence[Day], is_odd: Callable[[Day], bool]) -> Iterator[Day]:
    """The first day of each stretch of odd ones."""
    before = False
    for day in days:
        odd = is_odd(day)
        if odd and not before:
            yield day
        before = odd


def null_alerts(
    view: str, usual: Sequence[FeatureDay], days: Sequence[FeatureDay]
) -> Iterator[AlertEvent]:
    """Days on which features are missing more often than on any day of the baseline: one a day."""
    highest: dict[str, float] = defaultdict(float)
    for day in usual:
        highest[day.feature] = max(highest[day.feature], day.null_rate)
    by_day: dict[datetime, list[FeatureDay]] = defaultdict(list)
    for day in days:
        if day.null_rate > min(highest[day.feature] + MAX_NULL_RISE, 0.999):
            by_day[day.start].append(day)
    for start in sorted(by_day):
        known = {day.feature for day in by_day.get(start - DAY, [])}
        fresh = [d for d in by_day[start] if d.feature not in known]
        if not any(highest[day.feature] < 1 for day in fresh):  # all were missing once before
            continue
        worst = max(fresh, key=lambda day: day.null_rate)
        usually = highest[worst.feature]
        yield alert(
            "null_rate", view, worst.feature, _day(start), "warning", worst.null_rate,
            usually + MAX_NULL_RISE,
            f"{_named([day.feature for day in fresh])} of {view} missing in "
            f"{worst.null_rate:.0%} of the {worst.num_rows:,} rows of {start:%Y-%m-%d}; on a "
            f"day of the baseline in at most {usually:.0%}",
        )  # fmt: skip


def drift_alerts(
    view: str, start: datetime, drift: Sequence[WindowDrift], length: int
) -> Iterator[AlertEvent]:
    """Windows in which a view begins to drift, with the features that drift most: one a view."""
    by_end: dict[int, list[WindowDrift]] = defaultdict(list)
    for found in drift:
        by_end[found.end_day].append(found)
    known = sorted(by_end)[1:]  # what the first one has may have begun before
    before = any(d.drifted for d in by_end[min(by_end)]) if by_end else False
    for end in known:
        drifted = sorted((d for d in by_end[end] if d.drifted), key=lambda d: -d.psi)
        if drifted and not before:
            last, worst = start + end * DAY, drifted[0]
            span = TimeWindow(start=last - timedelta(days=length), end=last)
            yield alert(
                "drift", view, worst.feature, span, "warning", worst.psi, worst.bound,
                f"{_named([d.feature for d in drifted])} of {view} drifted in the "
                f"{length} days to {last:%Y-%m-%d}: PSI {worst.psi:.2f} above "
                f"{worst.bound:.2f}, KS {worst.ks:.2f}",
            )  # fmt: skip
        before = bool(drifted)


def _day(start: datetime) -> TimeWindow:
    return TimeWindow(start=start, end=start + DAY)


def _named(features: Sequence[str]) -> str:
    more = len(features) - MOST_NAMED
    return ", ".join(features[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def grouped(events: Sequence[AlertEvent]) -> tuple[str, ...]:
    """For people: one sentence a view and kind, counted, the most serious and frequent first.

    The sentence is that of the event which left its bound furthest. At most `MOST_GROUPS` are
    given, and then how much more there is.
    """
    groups: dict[tuple[str, str], list[AlertEvent]] = defaultdict(list)
    for event in events:
        groups[event.view, event.kind].append(event)
    ranked = sorted(
        groups.items(),
        key=lambda item: (all(e.severity != "critical" for e in item[1]), -len(item[1]), item[0]),
    )
    sentences = [_sentence(group) for _, group in ranked[:MOST_GROUPS]]
    if rest := ranked[MOST_GROUPS:]:
        sentences.append(
            f"{sum(len(group) for _, group in rest):,} alerts more, of "
            f"{len({view for (view, _), _ in rest}):,} other views or kinds; all are in {FILE} of "
            "the state folder"
        )
    return tuple(sentences)


def _sentence(group: Sequence[AlertEvent]) -> str:
    def excess(event: AlertEvent) -> float:
        if event.value is None:  # endless
            return float("inf")
        return abs(event.value - event.bound) / max(abs(event.bound), 1e-9)

    worst = max(group, key=excess)
    if len(group) == 1:
        return worst.sentence
    first, last = min(e.window.start for e in group), max(e.window.end for e in group)
    return (
        f"{len(group):,} times from {first:%Y-%m-%d} to {last:%Y-%m-%d}, at its worst: "
        f"{worst.sentence}"
    )


def append_alerts(home: Path, events: Sequence[AlertEvent]) -> int:
    """Append the events that are not there yet; returns how many.

    One writer at a time; a line left unfinished by a killed writer is ended before the next.
    """
    path = home / FILE
    with refused_writes_explained(path):
        make_folder(path.parent)
        with path.open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = {event.id for event in read_alerts(home)}
            fresh = list({e.id: e for e in events if e.id not in known}.values())
            if fresh:
                append_lines(path, [event.model_dump_json() for event in fresh])
    return len(fresh)


def read_alerts(home: Path) -> tuple[AlertEvent, ...]:
    """All events; a line that is no event, such as one of a killed writer, is passed over."""
    found = []
    for line in (home / FILE).read_bytes().split(b"\n"):
        try:
            found.append(AlertEvent.model_validate_json(line))
        except ValueError:
            continue
    return tuple(found)
