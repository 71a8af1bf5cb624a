"""Alert events for whoever decides: JSON lines under the state folder, appended, never changed.

An event's id is a digest of what it is about, so that monitoring a window again adds nothing. A
reader keeps a cursor, the number of bytes it has read, and gets what came after.

Drift of sliding windows against the baseline, with the noise of the baseline itself.

A PSI needs something to compare with: even two clean weeks differ. So each window of the baseline
is compared with the rest of it, and the largest such PSI over all features and windows of a view,
times a factor, is the least that counts. The largest over all features corrects for their number.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from tasks.contracts.base import TimeWindow
from tasks.evaluation.monitoring.config import MonitoringConfig
from tasks.evaluation.monitoring.statistics import DAY, Binned, FeatureDay, Floats, ViewDay
from tasks.kernel.errors import refused_writes_explained
from tasks.kernel.files import append_lines, make_folder
from tasks.stats.shift import distance, psi, shares

NOISE_FACTOR = 2.0
"""Times the PSI that windows of the baseline reach against the rest of it."""
MIN_KS = 0.2


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
    drifted: bool


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
    features: Sequence[Binned],
    baseline_days: tuple[int, int],
    ends: Sequence[int],
    config: MonitoringConfig,
) -> list[WindowDrift]:
    """Drift of every feature in each window that ends with one of `ends`.

    Args:
        features: binned features of one view.
        baseline_days: first day and day after the last, counted from the refreshed window's start.
        ends: days after the windows.
        config: lengths and bounds.
    """
    first, after = baseline_days
    in_baseline = [(f.days >= first) & (f.days < after) for f in features]
    references = [f.counts[mask] for f, mask in zip(features, in_baseline, strict=True)]
    noise = max((baseline_noise(c, config.window_days) for c in references), default=float("inf"))
    bound = max(config.min_psi, NOISE_FACTOR * noise)
    found = []
    for end in ends:
        for feature, reference in zip(features, references, strict=True):
            inside = (feature.days >= end - config.window_days) & (feature.days < end)
            current = feature.counts[inside].sum(axis=0)
            total = reference.sum(axis=0)
            if not current.sum() or not total.sum():
                continue
            index = float(psi(total, current))
            ks = float(distance(shares(current) - shares(total), ordered=True))
            drifted = bool(index > bound and ks > MIN_KS)
            found.append(WindowDrift(feature.feature, end, index, ks, bound, drifted))
    return found


MOST_GROUPS = 20
FILE = Path("monitoring") / "alerts.jsonl"
Kind = Literal["freshness", "null_rate", "drift", "volume"]
Severity = Literal["warning", "critical"]


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
        value=value if abs(value) < float("inf") else None,
        bound=bound,
        sentence=sentence,
    )


def grouped(events: Sequence[AlertEvent]) -> tuple[str, ...]:
    """For people: one sentence a view and kind, counted, the most serious and frequent first.

    The sentence is that of the event which left its bound furthest. At most `MOST_GROUPS` are
    given, and then how much more there is.
    """
    groups: dict[tuple[str, str], list[AlertEvent]] = {}
    for event in events:
        groups.setdefault((event.view, event.kind), []).append(event)
    ranked = sorted(groups.values(), key=_rank)
    told = [_sentence(group) for group in ranked[:MOST_GROUPS]]
    if rest := ranked[MOST_GROUPS:]:
        told.append(
            f"{sum(map(len, rest)):,} alerts more, of {len({g[0].view for g in rest}):,} other "
            f"views or kinds; all are in {FILE} of the state folder"
        )
    return tuple(told)


def _rank(group: Sequence[AlertEvent]) -> tuple[bool, int, str, str]:
    serious = any(event.severity == "critical" for event in group)
    return (not serious, -len(group), group[0].view, group[0].kind)


def _sentence(group: Sequence[AlertEvent]) -> str:
    worst = max(group, key=_excess)
    if len(group) == 1:
        return worst.sentence
    first, last = min(e.window.start for e in group), max(e.window.end for e in group)
    return (
        f"{len(group):,} times from {first:%Y-%m-%d} to {last:%Y-%m-%d}, at its worst: "
        f"{worst.sentence}"
    )


def _excess(event: AlertEvent) -> float:
    if event.value is None:  # endless
        return float("inf")
    return abs(event.value - event.bound) / max(abs(event.bound), 1e-9)


def append_alerts(home: Path, events: Sequence[AlertEvent]) -> int:
    """Append the events that are not there yet; returns how many.

    One writer at a time; a line left unfinished by a killed writer is ended before the next.
    """
    path = home / FILE
    with refused_writes_explained(path):
        make_folder(path.parent)
        with path.open("ab+") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            stream.seek(0)
            known = {event.id for event in _events(stream.read())}
            fresh = list({e.id: e for e in events if e.id not in known}.values())
            if fresh:
                append_lines(path, [event.model_dump_json() for event in fresh])
    return len(fresh)


def read_alerts(home: Path, cursor: NonNegativeInt = 0) -> tuple[tuple[AlertEvent, ...], int]:
    """Events after the cursor, and the cursor for the next time.

    A line that is still being written is left for the next time; one that is no event is passed
    over.
    """
    try:
        with (home / FILE).open("rb") as stream:
            stream.seek(cursor)
            content = stream.read()
    except FileNotFoundError:
        return (), 0
    whole = content[: content.rfind(b"\n") + 1]
    return tuple(_events(whole)), cursor + len(whole)


def _events(content: bytes) -> list[AlertEvent]:
    found = []
    for line in content.split(b"\n"):
        try:
            found.append(AlertEvent.model_validate_json(line))
        except ValueError:
            continue
    return found


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
