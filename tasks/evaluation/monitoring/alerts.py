"""Alert events for whoever decides: JSON lines under the state folder, appended, never changed.

An event's id is a digest of what it is about, so that monitoring a window again adds nothing. A
reader keeps a cursor, the number of bytes it has read, and gets what came after.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from tasks.contracts.base import TimeWindow
from tasks.kernel.errors import refused_writes_explained
from tasks.kernel.files import append_lines, make_folder

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
