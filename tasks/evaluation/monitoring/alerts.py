"""What left the baseline, as events: volume, freshness, nulls and drift of each view.

Events are JSON lines under the state folder, appended, never changed. An event's id is a digest of
what it is about, so that monitoring a window again adds nothing.

A PSI needs something to compare with: even two clean weeks differ. So each window of the baseline
is compared with the rest of it, and the largest such PSI over all features and windows of a view,
times a factor, is the least that counts. The largest over all features corrects for their number.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from pydantic import Field

from tasks.contracts.base import TimeWindow
from tasks.evaluation.monitoring.statistics import DAY, Binned, Floats
from tasks.kernel.errors import refused_writes_explained
from tasks.kernel.files import make_folder
from tasks.kernel.settings import append, bring
from tasks.kernel.values import Described, first_of
from tasks.metadata.database import held_everywhere
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
MIN_ENTITY_SHARE = 0.05
"""Of a view's rows in the baseline: an entity with fewer may fall silent."""
MOST_GROUPS = 20
MOST_NAMED = 3
Kind = Literal["freshness", "null_rate", "drift", "volume"]


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
    references = [feature.between(*baseline_days) for feature in features]
    noise = max((_baseline_noise(counts, length) for counts in references), default=math.inf)
    bound, found = max(MIN_PSI, NOISE_FACTOR * noise), []
    for end in ends:
        for feature, reference in zip(features, references, strict=True):
            current, total = feature.between(end - length, end).sum(axis=0), reference.sum(axis=0)
            if current.sum() and total.sum():
                ks = float(distance(shares(current) - shares(total), ordered=True))
                index = float(psi(total, current))
                found.append(WindowDrift(feature.feature, end, index, ks, bound))
    return found


def _baseline_noise(counts: Floats, length: int) -> float:
    """Largest PSI of windows of the baseline, end to end, against the rest of it.

    Endless where the baseline holds fewer than two windows: nothing can be judged then.
    """
    total, windows = counts.sum(axis=0), len(counts) // length
    if windows < 2:
        return math.inf
    parts = counts[: windows * length].reshape(windows, length, -1).sum(axis=1)
    return max(float(psi(total - part, part)) for part in parts)


def _id_of(given: Mapping[str, Any]) -> str:
    window = given["window"]
    about = [given["kind"], given["view"], given["feature"] or ""]
    about += [moment.isoformat() for moment in (window.start, window.end)]
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:32]


class AlertEvent(Described):
    """One thing that somebody should know."""

    kind: Kind
    view: str
    feature: str | None
    """Or the entity that is meant; None: the view as a whole."""
    window: TimeWindow
    time: datetime = Field(default_factory=lambda given: given["window"].end)
    """End of the window it speaks of, UTC."""
    id: str = Field(default_factory=_id_of, min_length=16)
    """Digest of kind, view, feature and window."""
    severity: Literal["warning", "critical"] = "warning"
    value: float | None = Field(description="What was seen; None where there is nothing to see.")
    bound: float
    sentence: str


def day_alerts(view: str, usual: pd.DataFrame, days: pd.DataFrame) -> Iterator[AlertEvent]:
    """First days with far fewer or more rows than the baseline's, or with older newest rows."""
    least, most = int(usual["num_rows"].min()), int(usual["num_rows"].max())  # empty days included
    low, high = least / VOLUME_FACTOR, most * VOLUME_FACTOR
    for day in _beginnings(days, ~days["num_rows"].between(low, high)):
        yield AlertEvent(
            kind="volume", view=view, feature=None, window=_day(day.start), value=day.num_rows,
            bound=low if day.num_rows < low else high,
            sentence=f"{view} has {day.num_rows:,} rows on {day.start:%Y-%m-%d}; the days of the "
            f"baseline have {least:,} to {most:,}",
            severity="warning" if day.num_rows else "critical",
        )  # fmt: skip
    oldest = float(usual["age_hours"].max())
    bound = oldest + SPARE_AGE_H
    for day in _beginnings(days, days["age_hours"] > bound):
        known = math.isfinite(day.age_hours)
        age = f"is {day.age_hours:.0f} h old" if known else "has had no value yet"
        yield AlertEvent(
            kind="freshness", view=view, feature=None, window=_day(day.start), bound=bound,
            value=day.age_hours if known else None,
            sentence=f"{view} {age} at {day.start + DAY:%Y-%m-%d %H:%MZ}; in the baseline it was "
            f"at most {oldest:.0f} h",
            severity="critical",
        )  # fmt: skip


def entity_alerts(view: str, usual: pd.DataFrame, ages: pd.DataFrame) -> Iterator[AlertEvent]:
    """First days at whose end one entity's newest row is older than in the baseline.

    An entity that may rest for a day is not judged. Ages count from the freshest entity's row on:
    where a whole view stops, it is the view that has stopped.

    Args:
        view: its name.
        usual: `ViewTable.entity_ages` of the baseline.
        ages: those of the days in question.
    """
    oldest = usual.groupby("entity")["age_hours"].max()
    oldest = oldest[oldest <= DAY.total_seconds() / 3600]
    behind = ages["age_hours"] - ages.groupby("start")["age_hours"].transform("min")
    ages = ages.assign(usual=ages["entity"].map(oldest), behind=behind)
    ages = ages[ages["usual"].notna()]
    ages["bound"] = ages["usual"] + ages["usual"].clip(lower=SPARE_AGE_H)
    ages["odd"] = ages["behind"] > ages["bound"]
    for entity, days in ages.groupby("entity"):
        for day in _beginnings(days, days["odd"]):
            yield AlertEvent(
                kind="freshness", view=view, feature=str(entity), window=_day(day.start),
                value=day.age_hours, bound=day.bound, severity="critical",
                sentence=f"{view} of {entity} is {day.age_hours:.0f} h old at "
                f"{day.start + DAY:%Y-%m-%d %H:%MZ} and others are not; in the baseline it was at "
                f"most {day.usual:.0f} h",
            )  # fmt: skip


def _beginnings(days: pd.DataFrame, odd: pd.Series) -> Iterator[Any]:
    """The first day of each stretch of odd ones."""
    return days[odd & ~odd.shift(fill_value=False)].itertuples()


def null_alerts(view: str, usual: pd.DataFrame, days: pd.DataFrame) -> Iterator[AlertEvent]:
    """Days on which features are missing more often than on any day of the baseline: one a day."""
    highest = usual.groupby("feature")["null_rate"].max()
    days = days.assign(usual=days["feature"].map(highest).fillna(0.0))
    odd = days[days["null_rate"] > np.minimum(days["usual"] + MAX_NULL_RISE, 0.999)]
    told = pd.MultiIndex.from_arrays([odd["start"] + DAY, odd["feature"]])
    fresh = odd[~pd.MultiIndex.from_frame(odd[["start", "feature"]]).isin(told)]
    start: Any
    for start, features in fresh.groupby("start"):
        if (features["usual"] == 1).all():  # all were missing once before
            continue
        worst: Any = features.nlargest(1, "null_rate").iloc[0]
        yield AlertEvent(
            kind="null_rate", view=view, feature=worst["feature"], window=_day(start),
            value=worst["null_rate"], bound=worst["usual"] + MAX_NULL_RISE,
            sentence=f"{first_of(list(features['feature']), MOST_NAMED)} of {view} missing in "
            f"{worst['null_rate']:.0%} of the {worst['num_rows']:,} rows of {start:%Y-%m-%d}; "
            f"on a day of the baseline in at most {worst['usual']:.0%}",
        )  # fmt: skip


def drift_alerts(
    view: str, start: datetime, drift: Sequence[WindowDrift], length: int
) -> Iterator[AlertEvent]:
    """Windows in which a view begins to drift, with the features that drift most: one a view.

    What the first window has may have begun before.
    """
    before = True
    for end in sorted({found.end_day for found in drift}):
        drifted = sorted((d for d in drift if d.end_day == end and d.drifted), key=lambda d: -d.psi)
        if drifted and not before:
            last, worst = start + end * DAY, drifted[0]
            yield AlertEvent(
                kind="drift", view=view, feature=worst.feature, value=worst.psi, bound=worst.bound,
                window=TimeWindow(start=last - length * DAY, end=last),
                sentence=f"{first_of([d.feature for d in drifted], MOST_NAMED)} of {view} drifted "
                f"in the {length} days to {last:%Y-%m-%d}: PSI {worst.psi:.2f} above "
                f"{worst.bound:.2f}, KS {worst.ks:.2f}",
            )  # fmt: skip
        before = bool(drifted)


def _day(start: datetime) -> TimeWindow:
    return TimeWindow(start=start, end=start + DAY)


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
            f"{sum(len(group) for _, group in rest):,} alerts more, of {len(rest):,} other views "
            f"or kinds; all are in {FILE} of the state folder"
        )
    return tuple(sentences)


def _sentence(group: Sequence[AlertEvent]) -> str:
    def excess(event: AlertEvent) -> float:
        if event.value is None:  # endless
            return math.inf
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
        with held_everywhere(path.with_suffix(".lock")):
            known = {event.id for event in read_alerts(home)}
            fresh = {e.id: e for e in events if e.id not in known}
            if fresh:
                append(path, [event.model_dump_json() for event in fresh.values()])
    return len(fresh)


def read_alerts(home: Path) -> tuple[AlertEvent, ...]:
    """All events; a line that is no event, such as one of a killed writer, is passed over."""
    found = []
    file = bring(home / FILE)
    for line in file.read_bytes().split(b"\n") if file.exists() else ():
        try:
            found.append(AlertEvent.model_validate_json(line))
        except ValueError:
            continue
    return tuple(found)
