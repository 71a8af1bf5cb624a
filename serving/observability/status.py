"""What the status page tells: versions, tracks, traffic, latency, refusals, drift; as plain values.

Rates and percentiles are differences between the counters of now and of a minute ago, so nothing is
worked out while requests are answered.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

from serving.interfaces import TRACKS, VersionState
from serving.observability.metrics import NUM_BOUNDS, Counting, Source, percentile_s

PERCENTILES = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
OURS = frozenset({"internal", "overloaded", "not_ready", "deadline", "backend"})
"""Reasons that are no client's fault."""
SeriesKey = tuple[str, ...]
Drift = Callable[[str], Mapping[str, Any] | None]
"""The newest drift result of a model, by its name."""
STEP_S, NUM_STEPS = 5.0, 120
"""Between points of the page's curves, and points that are kept: ten minutes."""
RECENT_S = 60.0
"""Rates and percentiles are of so long."""
REFRESH_S = 5.0
"""How often the page asks again."""
DROPPED = {"dropped": "entries", "dropped_rows": "rows"}
"""Counters of what a part lost, with what it is."""
OFF = {
    "stale": "that are too old",
    "ahead": "from after the moment of the read; set `entities.moment` for recorded data",
}
"""States of feature values that need attention, in words."""


@dataclass(frozen=True)
class Point:
    """Counters at one moment."""

    moment: float
    latency: dict[SeriesKey, list[int]]
    refused: dict[SeriesKey, int]
    sources: dict[str, Mapping[str, Any]]


class History:
    """The counters of the last minutes, one point a step. On the event loop's thread."""

    def __init__(self, counting: Counting, sources: Iterable[Source]) -> None:
        self._counting, self._sources = counting, tuple(sources)
        self._points: deque[Point] = deque(maxlen=NUM_STEPS + 1)
        self.note()

    def note(self) -> None:
        """Keep a point."""
        self._points.append(self.now())

    def now(self) -> Point:
        """The counters as they are."""
        return Point(
            moment=time.monotonic(),
            latency={k: s.latency.counts[:] for k, s in self._counting.series.items()},
            refused=dict(self._counting.refused_calls),
            sources={source.name: source.read() for source in self._sources},
        )

    def before(self, now: Point) -> Point:
        """The newest point that is as old as `RECENT_S`; the oldest where none is."""
        wanted = now.moment - RECENT_S
        older = [point for point in self._points if point.moment <= wanted]
        return older[-1] if older else self._points[0]

    def rates(self, wanted: Callable[[SeriesKey], bool]) -> list[float]:
        """Calls answered a second in each step, the oldest first, of the series that are wanted."""
        points, rates = list(self._points), []
        for earlier, later in itertools.pairwise(points):
            calls = sum(
                sum(counts) - sum(earlier.latency.get(key, ()))
                for key, counts in later.latency.items()
                if wanted(key)
            )
            rates.append(round(calls / max(later.moment - earlier.moment, 1e-3), 2))
        return rates


class Status:
    """Makes the status of one process.

    Args:
        counting: what was answered and refused.
        history: counters of the last minutes.
        states: versions of the process.
        drift: newest drift result of a model.
    """

    def __init__(
        self,
        counting: Counting,
        history: History,
        states: Callable[[], Sequence[VersionState]],
        drift: Drift,
    ) -> None:
        self._counting, self._history = counting, history
        self._states, self._drift = states, drift

    def read(self) -> dict[str, Any]:
        """Everything the page shows, JSON-ready."""
        now = self._history.now()
        window = _Window(now, self._history.before(now))
        states = list(self._states())
        served = {key[0] for key in self._counting.series}
        models = [
            self._model(name, [s for s in states if s.name == name], window)
            for name in sorted(served | {state.name for state in states})
        ]
        started = datetime.fromtimestamp(self._counting.started_at, UTC)
        return {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "refresh_s": REFRESH_S,
            "recent_s": round(window.length_s),
            "step_s": STEP_S,
            "process": {
                "pid": os.getpid(),
                "started_at": started.isoformat(timespec="seconds"),
                "up_s": round(time.time() - self._counting.started_at),
            },
            "models": models,
            "refusals": window.refusals(),
            "parts": _parts(now.sources),
            "freshness": window.freshness(),
            "notices": [*_notices(models), *window.notices()],
        }

    def _model(self, name: str, states: list[VersionState], window: _Window) -> dict[str, Any]:
        versions = [_version(state, window) for state in states]
        known = {state.version for state in states}
        gone = sorted({key[1] for key in window.now.latency if key[0] == name} - known)
        versions += [
            _version(VersionState(name, version, "UNAVAILABLE", "unloaded"), window)
            for version in gone
            if window.calls((name, version))
        ]
        rates = {track: window.rate(name, track) for track in TRACKS}
        live = sum(rate for track, rate in rates.items() if track != "shadow")
        tracks = []
        for track in TRACKS:
            holder = next((state.version for state in states if track in state.tracks), None)
            if holder is None and not rates[track]:
                continue
            tracks.append(
                {
                    "slot": track,
                    "version": holder,
                    "rate_per_s": rates[track],
                    "share": rates[track] / live if live and track != "shadow" else None,
                    "points": self._history.rates(_of_track(name, track)),
                }
            )
        return {"name": name, "versions": versions, "slots": tracks, "drift": self._drift(name)}


@dataclass(frozen=True)
class _Window:
    """Differences between two points."""

    now: Point
    before: Point

    @property
    def length_s(self) -> float:
        return max(self.now.moment - self.before.moment, 1e-3)

    def counts(self, start: tuple[str, ...], track: str | None = None) -> list[int]:
        """Latencies of all series whose key begins so."""
        total = [0] * (NUM_BOUNDS + 1)
        for key, later in self.now.latency.items():
            if key[: len(start)] == start and track in (None, key[3]):
                earlier = self.before.latency.get(key) or [0] * len(later)
                total = [t + a - b for t, a, b in zip(total, later, earlier, strict=True)]
        return total

    def calls(self, start: tuple[str, ...]) -> int:
        """Answered calls since the process began."""
        return sum(sum(c) for key, c in self.now.latency.items() if key[: len(start)] == start)

    def rate(self, model: str, track: str) -> float:
        """Answered calls a second."""
        return round(sum(self.counts((model,), track)) / self.length_s, 2)

    def refusals(self) -> list[dict[str, Any]]:
        """Counts by model, track and reason, the newest trouble first."""
        found = [
            {
                "model": model,
                "slot": track,
                "reason": reason,
                "total": count,
                "recent": count - self.before.refused.get((model, track, reason), 0),
                "is_ours": reason in OURS,
            }
            for (model, track, reason), count in self.now.refused.items()
        ]
        return sorted(found, key=lambda one: (-int(str(one["recent"])), -int(str(one["total"]))))

    def freshness(self) -> list[dict[str, Any]]:
        """Rows of each feature view by state, in the window."""
        found = []
        for name, numbers in self.now.sources.items():
            earlier = self.before.sources.get(name, {}).get("freshness", {})
            for view, states in numbers.get("freshness", {}).items():
                past = earlier.get(view, {})
                rows = {state: rows - past.get(state, 0) for state, rows in states.items()}
                found.append({"view": view, "rows": {s: max(n, 0) for s, n in rows.items()}})
        return found

    def notices(self) -> list[str]:
        """Sentences about what went wrong in the window."""
        said = [
            f"{one['recent']} calls of {one['model']} ({one['slot']}) refused: {one['reason']}"
            for one in self.refusals()
            if one["recent"] and one["is_ours"]
        ]
        for name, numbers in self.now.sources.items():
            for kind, words in DROPPED.items():
                past = self.before.sources.get(name, {}).get(kind)
                if (lost := _total(numbers.get(kind)) - _total(past)) > 0:
                    said.append(f"{name} dropped {lost:g} {words}")
            if numbers.get("failing"):
                said.append(f"{name} cannot write; it is tried again, and what waits is kept")
        for one in self.freshness():
            for state, words in OFF.items():
                if rows := one["rows"].get(state, 0):
                    said.append(f"{rows} rows were read with values of {one['view']} {words}")
        return said


def _total(counted: Any) -> float:
    """A counter, or all counters of a mapping."""
    if isinstance(counted, Mapping):
        return sum(map(_total, counted.values()))
    return counted if isinstance(counted, int | float) else 0


def _of_track(name: str, track: str) -> Callable[[SeriesKey], bool]:
    return lambda key: key[0] == name and key[3] == track


def _version(state: VersionState, window: _Window) -> dict[str, Any]:
    start = (state.name, state.version)
    counts = window.counts(start)
    times = {
        name: None if (found := percentile_s(counts, share)) is None else round(found * 1e3, 3)
        for name, share in PERCENTILES.items()
    }
    return {
        "version": state.version,
        "state": state.state,
        "reason": state.reason,
        "slots": list(state.tracks),
        "variant": state.variant,
        "hardware": state.hardware,
        "platform": state.platform,
        "requests": window.calls(start),
        "rate_per_s": round(sum(counts) / window.length_s, 2),
        **times,
    }


def _parts(sources: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Plain numbers of each source, flat."""
    return [
        {"name": name, "numbers": dict(_flat(numbers))}
        for name, numbers in sources.items()
        if any(True for _ in _flat(numbers))
    ]


def _flat(numbers: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    for name, value in numbers.items():
        if name == "freshness":
            continue
        words = " ".join(name) if isinstance(name, tuple) else name
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{words} ")
        elif isinstance(value, int | float):
            yield f"{prefix}{words}".replace("_", " ").strip(), value


def _notices(models: list[dict[str, Any]]) -> Iterable[str]:
    for model in models:
        name = model["name"]
        if not any("stable" in v["slots"] and v["state"] == "READY" for v in model["versions"]):
            yield f"{name} has no ready version in track stable"
        for v in model["versions"]:
            if v["state"] == "UNAVAILABLE" and v["reason"] and v["reason"] != "unloaded":
                yield f"{name} version {v['version']}: {v['reason']}"
        if (drift := model["drift"]) and drift.get("is_trouble"):
            yield f"{name}: the newest drift check says {drift['verdict'].replace('_', ' ')}"


def status_page(status: Mapping[str, Any]) -> str:
    """The page with what is known now; its script asks for more."""
    style, script = _text("page.css"), _text("page.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    seen = json.dumps(status, allow_nan=False).replace("<", "\\u003c")
    return _text("page.html").format(policy=policy, style=style, seen=seen, script=script)


@cache
def _text(name: str) -> str:
    return (files("serving.observability") / name).read_text(encoding="utf-8")


@cache
def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
