"""The status page: versions, tracks, traffic, latency, refusals; as plain values and as a page.

Rates and percentiles are differences between the counters of now and of a minute ago, so nothing is
worked out while requests are answered.
"""

import asyncio
import base64
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

from serving.config import ObservabilityConfig
from serving.interfaces import TRACKS, Observer, Pages, VersionState
from serving.observability.metrics import (
    NUM_BOUNDS,
    Counting,
    Labels,
    Metrics,
    Source,
    percentile_s,
)
from serving.observability.tracing import Tracing
from serving.repeated import Repeated

PERCENTILES = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
OF_VERSION = ("version", "state", "reason", "variant", "hardware", "platform")
OURS = frozenset({"internal", "overloaded", "not_ready", "deadline", "backend"})
"""Reasons that are no client's fault."""
STEP_S = 5.0
"""Between points that are kept."""
RECENT_S = 60.0
"""Rates and percentiles are of so long."""
REFRESH_S = 5.0
"""How often the page asks again."""
DROPPED = {"dropped": "entries", "dropped_rows": "rows"}
"""Counters of what a component lost, with what it is."""
OFF = {
    "stale": "that are too old",
    "ahead": "from after the moment of the read; set `entities.moment` for recorded data",
}
"""States of feature values that need attention, in words."""


@dataclass(frozen=True)
class Point:
    """Counters at one moment."""

    moment: float
    latency: dict[Labels, list[int]]
    refused: dict[Labels, int]
    sources: dict[str, Mapping[str, Any]]


class Observability:
    """Counters, metrics, traces and status page of one process. On the event loop's thread.

    Args:
        config: what goes where.
        states: versions of the process, as `ModelEngine.states` reports them.
        sources: counters of further components: engine, log, entity reader.
    """

    def __init__(
        self,
        config: ObservabilityConfig,
        *,
        states: Callable[[], Sequence[VersionState]],
        sources: Iterable[Source] = (),
    ) -> None:
        self._states, self._sources = states, tuple(sources)
        self.counting = Counting(lambda model: any(state.name == model for state in states()))
        self._tracing = Tracing(config.traces)
        self._metrics = Metrics(self.counting, states, self._sources)
        self._keeping = Repeated("noting the status", STEP_S, self._note)
        self._points = deque([self._now()], round(RECENT_S / STEP_S))

    @property
    def observers(self) -> tuple[Observer, ...]:
        """All that want to know what is served."""
        return self.counting, self._tracing

    @property
    def pages(self) -> Pages:
        """For the admin listener."""
        return {"/metrics": self._metrics.page, "/status": self._page, "/status.json": self._json}

    async def start(self) -> None:
        """Start keeping points of the status and sending spans."""
        self._tracing.start()
        self._keeping.start()

    async def stop(self) -> None:
        """Send the spans that wait, and end."""
        await self._keeping.stop()
        await asyncio.to_thread(self._tracing.stop)

    def _page(self) -> tuple[str, bytes]:
        return "text/html; charset=utf-8", status_page(self.read()).encode()

    def _json(self) -> tuple[str, bytes]:
        return "application/json", json.dumps(self.read(), allow_nan=False).encode()

    async def _note(self) -> None:
        """Keep the counters as they are, to compare later ones with."""
        self._points.append(self._now())

    def read(self) -> dict[str, Any]:
        """Everything the page shows, JSON-ready."""
        window = _Window(self._points[0], self._now())
        states = list(self._states())
        names = {key[0] for key in self.counting.series} | {state.name for state in states}
        models = [_model(n, [s for s in states if s.name == n], window) for n in sorted(names)]
        refusals, freshness = window.refusals(), window.freshness()
        now, began = datetime.now(UTC), datetime.fromtimestamp(self.counting.started_at, UTC)
        process = {"pid": os.getpid(), "started_at": began.isoformat(timespec="seconds")}
        notices = [*_of_models(models), *_of_refusals(refusals), *window.losses()]
        return {
            "at": now.isoformat(timespec="seconds"),
            "refresh_s": REFRESH_S,
            "recent_s": round(window.length_s),
            "process": {**process, "up_s": round((now - began).total_seconds())},
            "queued_requests": _total(window.now.sources.get("engine", {}).get("queued_requests")),
            "models": models,
            "refusals": refusals,
            "freshness": [{"view": view, "rows": rows} for view, rows in freshness.items()],
            "notices": [*notices, *_of_freshness(freshness)],
        }

    def _now(self) -> Point:
        latency = {k: s.latency.counts[:] for k, s in self.counting.series.items()}
        sources = {source.name: source.read() for source in self._sources}
        return Point(time.monotonic(), latency, dict(self.counting.refused_calls), sources)


@dataclass(frozen=True)
class _Window:
    """Differences between two points."""

    before: Point
    now: Point

    @property
    def length_s(self) -> float:
        return max(self.now.moment - self.before.moment, 1e-3)

    def counts(self, start: Labels, track: str | None = None) -> list[int]:
        """Latencies of all series whose key begins so."""
        total = [0] * (NUM_BOUNDS + 1)
        for key, later in self.now.latency.items():
            if key[: len(start)] == start and track in (None, key[3]):
                earlier = self.before.latency.get(key) or [0] * len(later)
                total = [t + a - b for t, a, b in zip(total, later, earlier, strict=True)]
        return total

    def rate(self, start: Labels, track: str | None = None) -> float:
        """Answered calls a second."""
        return round(sum(self.counts(start, track)) / self.length_s, 2)

    def refusals(self) -> list[dict[str, Any]]:
        """Counts by model, track and reason, the newest trouble first."""
        found: list[dict[str, Any]] = [
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
        return sorted(found, key=lambda one: (-one["recent"], -one["total"]))

    def freshness(self) -> dict[str, dict[str, int]]:
        """Rows of each feature view by state."""
        found: dict[str, dict[str, int]] = {}
        for name, numbers in self.now.sources.items():
            earlier = self.before.sources.get(name, {}).get("freshness", {})
            for (view, state), rows in numbers.get("freshness", {}).items():
                found.setdefault(view, {})[state] = max(rows - earlier.get((view, state), 0), 0)
        return found

    def losses(self) -> Iterator[str]:
        """Sentences about what components lost."""
        for name, numbers in self.now.sources.items():
            for kind, words in DROPPED.items():
                past = self.before.sources.get(name, {}).get(kind)
                if (lost := _total(numbers.get(kind)) - _total(past)) > 0:
                    yield f"{name} dropped {lost:g} {words}"
            if numbers.get("failing"):
                yield f"{name} cannot write; it is tried again, and what waits is kept"


def _total(counted: Mapping[Any, float] | float | None) -> float:
    """A counter, or all counters of a mapping."""
    return sum(counted.values()) if isinstance(counted, Mapping) else counted or 0


def _model(name: str, states: list[VersionState], window: _Window) -> dict[str, Any]:
    known = {state.version for state in states}
    gone = sorted({key[1] for key in window.now.latency if key[0] == name} - known)
    states = [*states, *(VersionState(name, number, "UNAVAILABLE", "unloaded") for number in gone)]
    rates = {track: window.rate((name,), track) for track in TRACKS}
    live = sum(rate for track, rate in rates.items() if track != "shadow")
    tracks = []
    for track, rate in rates.items():
        holder = next((state.version for state in states if track in state.tracks), None)
        if holder is not None or rate:
            share = rate / live if live and track != "shadow" else None
            shown = {"slot": track, "version": holder, "rate_per_s": rate, "share": share}
            tracks.append(shown)
    versions = [_version(state, window) for state in states]
    return {"name": name, "versions": versions, "slots": tracks}


def _version(state: VersionState, window: _Window) -> dict[str, Any]:
    start = (state.name, state.version)
    counts, latency = window.counts(start), window.now.latency
    times = {
        name: None if (found := percentile_s(counts, share)) is None else round(found * 1e3, 3)
        for name, share in PERCENTILES.items()
    }
    return {
        **{name: getattr(state, name) for name in OF_VERSION},
        "slots": list(state.tracks),
        "requests": sum(sum(c) for key, c in latency.items() if key[:2] == start),
        "rate_per_s": window.rate(start),
        **times,
    }


def _of_models(models: list[dict[str, Any]]) -> Iterator[str]:
    for model in models:
        name = model["name"]
        if not any("stable" in v["slots"] and v["state"] == "READY" for v in model["versions"]):
            yield f"{name} has no ready version in track stable"
        for v in model["versions"]:
            if v["state"] == "UNAVAILABLE" and v["reason"] and v["reason"] != "unloaded":
                yield f"{name} version {v['version']}: {v['reason']}"


def _of_refusals(refusals: list[dict[str, Any]]) -> Iterator[str]:
    for one in refusals:
        if one["recent"] and one["is_ours"]:
            of = f"{one['model']} ({one['slot']})"
            yield f"{one['recent']} calls of {of} refused: {one['reason']}"


def _of_freshness(freshness: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    for view, rows in freshness.items():
        for state, words in OFF.items():
            if rows.get(state):
                yield f"{rows[state]} rows were read with values of {view} {words}"


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
