"""The page of one release: its steps, what was known when, and what was decided on it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from markupsafe import Markup

from tasks.kernel.files import write_atomically
from tasks.release.records import Entry, Evidence, Finding, MetricName, Release, Tally
from tasks.reporting.axes import Frame, Linear
from tasks.reporting.page import FOLDER, page_environment
from tasks.reporting.quantities import is_shown, significant
from tasks.reporting.svg import STYLE_SHEET, as_data_url, label, line, tag
from tasks.reporting.svg import picture as drawing

WIDTH, HEIGHT = 520.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 60.0, 16.0, 40.0, 48.0
STRIP_HEIGHT, BAR = 118.0, 26.0
NAMES: dict[MetricName, str] = {
    "task_paired": "Task metric, same requests",
    "task_split": "Task metric, split requests",
    "errors": "Failed requests",
    "latency": "Slow requests",
    "scores": "Distribution of scores",
}
NO_HARM: dict[MetricName, float] = {
    "task_paired": 0.0,
    "task_split": 0.0,
    "errors": 1.0,
    "latency": 1.0,
    "scores": 0.0,
}
"""Value at which both versions are alike."""


def write_page(release: Release, entries: Sequence[Entry], home: Path) -> Path:
    """Write `release/<id>.html` of the state folder, and `release/<model>.html` for the newest.

    Raises:
        StorageError: the disk refused.
    """
    folder = home / "release"
    text = render_page(release, entries)
    page = folder / f"{release.release_id}.html"
    write_atomically(page, text)
    write_atomically(folder / f"{release.model}.html", text)
    return page


def render_page(release: Release, entries: Sequence[Entry]) -> str:
    """The whole page, self-contained: no script and no address that a browser would load."""
    evidence = newest_evidence(entries)
    return (
        page_environment()
        .get_template("release.html.j2")
        .render(
            release=release,
            entries=entries,
            evidence=evidence,
            names=NAMES,
            answered=_answered(evidence),
            strip=steps_strip(release, entries),
            charts=charts(release, entries),
            bars=_bars(evidence),
            chart_style=Markup(STYLE_SHEET.read_text(encoding="utf-8")),
            page_style=Markup((FOLDER / "report.css").read_text(encoding="utf-8")),
        )
    )


def newest_evidence(entries: Sequence[Entry]) -> Evidence | None:
    """What the last look saw."""
    return next((entry.evidence for entry in reversed(entries) if entry.evidence), None)


def picture(release: Release, entries: Sequence[Entry]) -> str:
    """The picture for the Prefect UI, as an image address: the metric that says most."""
    drawn = charts(release, entries)
    chosen = next((drawn[name] for name in NAMES if name in drawn), None)
    return as_data_url(chosen if chosen is not None else steps_strip(release, entries))


def charts(release: Release, entries: Sequence[Entry]) -> dict[MetricName, Markup]:
    """Bounds over time, one picture for each metric of which something is known."""
    found: dict[MetricName, Markup] = {}
    for metric in NAMES:
        points = _points(release.opened_at, entries, metric)
        if points:
            found[metric] = _bounds_chart(metric, points)
    return found


def _points(
    start: datetime, entries: Sequence[Entry], metric: MetricName
) -> list[tuple[float, Finding]]:
    """Hours since the start, and what was known."""
    found = []
    for entry in entries:
        finding = entry.evidence.finding(metric) if entry.evidence else None
        if finding is not None and finding.estimate is not None and finding.low is not None:
            found.append(((entry.at - start).total_seconds() / 3600, finding))
    return found


def _bounds_chart(metric: MetricName, points: Sequence[tuple[float, Finding]]) -> Markup:
    unit, per_hour = ("minutes", 60) if points[-1][0] < 3 else ("hours", 1)
    points = [(hours * per_hour, finding) for hours, finding in points]
    frame = _frame(metric, points)
    alike, last = NO_HARM[metric], points[-1][1]
    upper = [
        (frame.x(x), frame.y(frame_top(frame) if f.high is None else f.high)) for x, f in points
    ]
    lower = [(frame.x(x), frame.y(f.low or 0.0)) for x, f in points]
    middle = [(frame.x(x), frame.y(f.estimate or 0.0)) for x, f in points]
    low, high = significant(last.low), significant(last.high)
    at = frame.y(alike)
    return drawing(
        f"{NAMES[metric]}: bounds over time",
        f"{last.unit}, at the end between {low} and {high}; alike versions are at {alike:g}.",
        WIDTH,
        HEIGHT,
        frame.grid(f"{unit} since the start", last.unit),
        tag("polygon", points=_path([*upper, *reversed(lower)]), fill="var(--wash)"),
        line(frame.left, at, frame.right, at, "baseline"),
        label("alike", frame.right, at - 5, anchor="end", kind="faint"),
        tag("polyline", points=_path(middle), class_="line s1"),
        tag("circle", cx=middle[-1][0], cy=middle[-1][1], r=3.5, fill="var(--water)"),
    )


def frame_top(frame: Frame) -> float:
    """Largest value that a frame shows."""
    assert isinstance(frame.y, Linear)
    return frame.y.high


def _frame(metric: MetricName, points: Sequence[tuple[float, Finding]]) -> Frame:
    """A frame in which the newest bounds fill about a third; wider ones run off its edges."""
    last, alike = points[-1][1], NO_HARM[metric]
    ends = [alike, last.estimate or 0.0, last.low or 0.0]
    ends += [last.high] if is_shown(last.high) and last.high is not None else []
    low, high = min(ends), max(ends)
    reach = max(high - low, 0.01)
    bottom, top = (low - reach, high + reach) if metric.startswith("task") else (0.0, high + reach)
    moments = [x for x, _ in points]
    end = max(moments[-1], moments[0] + 0.01)
    return Frame(
        x=Linear(moments[0], end, LEFT, WIDTH - RIGHT),
        y=Linear(bottom, top, HEIGHT - BOTTOM, TOP),
        left=LEFT,
        top=TOP,
        right=WIDTH - RIGHT,
        bottom=HEIGHT - BOTTOM,
    )


def steps_strip(release: Release, entries: Sequence[Entry]) -> Markup:
    """The share of the candidate over time, as steps of a stair."""
    end = release.closed_at or max((e.at for e in entries), default=release.step_since)
    total = max((end - release.opened_at).total_seconds(), 1.0)
    wide = WIDTH * 2 - LEFT - RIGHT
    floor, parts = STRIP_HEIGHT - BAR, []
    for period in release.periods:
        begin = (period.since - release.opened_at).total_seconds() / total * wide
        until = ((period.until or end) - release.opened_at).total_seconds() / total * wide
        tall = 4 + (floor - 30) * period.shares.candidate / 100
        name = release.steps[period.step].name
        width = max(until - begin, 2.0)
        tip = tag(
            "title",
            f"{name}: {period.shares.candidate:g} % of the requests, copies of "
            f"{period.shares.mirror:g} %",
        )
        parts.append(
            tag(
                "rect",
                tip,
                x=LEFT + begin,
                y=floor - tall,
                width=width,
                height=tall,
                fill="var(--water)" if period.shares.candidate else "var(--stone)",
            )
        )
        if width > 60:
            parts.append(label(name, LEFT + begin + 4, floor - tall - 6, kind="label"))
    hours = total / 3600
    return drawing(
        "Share of the candidate over time",
        f"{len(release.periods)} steps in {hours:.1f} hours.",
        WIDTH * 2,
        STRIP_HEIGHT,
        *parts,
        line(LEFT, floor, LEFT + wide, floor, "axis"),
        label("0 h", LEFT, STRIP_HEIGHT - 8, kind="tick"),
        label(f"{hours:.1f} h", LEFT + wide, STRIP_HEIGHT - 8, anchor="end", kind="tick"),
        kind="flow",
    )


def _answered(evidence: Evidence | None) -> list[tuple[str, Tally]]:
    if evidence is None:
        return []
    told = [("stable", evidence.stable), ("candidate", evidence.candidate)]
    return [*told, ("candidate, copies", evidence.shadow)]


def _bars(evidence: Evidence | None) -> list[tuple[str, Markup]]:
    """Histograms of scores and latency, one below the other, for each of the three."""
    if evidence is None:
        return []
    return [
        (title, _histograms(title, [(n, getattr(t, field)) for n, t in _answered(evidence)]))
        for title, field in (
            ("Scores, 0 to 1", "score_histogram"),
            ("Latency, 0.1 ms to 10 s, by factors of 1.6", "latency_histogram"),
        )
    ]


def _histograms(title: str, rows: Sequence[tuple[str, Sequence[int]]]) -> Markup:
    shown = [(name, counts) for name, counts in rows if sum(counts)]
    height = 64.0
    parts = []
    for number, (name, counts) in enumerate(shown):
        top, total = number * height + 24, sum(counts)
        tallest, wide = max(counts), (WIDTH - 2 * RIGHT) / len(counts)
        parts.append(label(f"{name}: {total:,}", RIGHT, top - 6, kind="label"))
        for place, many in enumerate(counts):
            tall = (height - 26) * many / tallest
            parts.append(
                tag(
                    "rect",
                    tag("title", f"{many / total:.1%}"),
                    x=RIGHT + place * wide,
                    y=top + height - 26 - tall,
                    width=max(wide - 1, 1.0),
                    height=tall,
                    fill=("var(--stone)", "var(--water)", "var(--sand)")[number % 3],
                )
            )
    return drawing(title, title, WIDTH, max(len(shown) * height, 40.0), *parts)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
