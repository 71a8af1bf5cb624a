"""The page of one release: its steps, what was known when, and what was decided on it."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from markupsafe import Markup

from tasks.contracts.rollout import Entry, Evidence, Finding, MetricName, ReleaseSummary, Tally
from tasks.governance.duties import broken_glass
from tasks.kernel.files import write_atomically
from tasks.reporting.drawing import BASELINE, LINES, SOFT, STONE, WASH, WATER, canvas
from tasks.reporting.gallery import as_data_url
from tasks.reporting.page import page_environment
from tasks.reporting.quantities import is_shown, significant

NAMES: dict[MetricName, str] = {
    "task_paired": "Task metric, same requests",
    "task_split": "Task metric, split requests",
    "errors": "Failed requests",
    "latency": "Slow requests",
    "scores": "Distribution of scores",
}
NO_HARM: dict[MetricName, float] = dict.fromkeys(NAMES, 0.0) | {"errors": 1.0, "latency": 1.0}
"""Value at which both versions are alike."""


def write_page(release: ReleaseSummary, entries: Sequence[Entry], home: Path) -> Path:
    """Write `release/<id>.html` of the state folder, and `release/<model>.html` for the newest.

    Raises:
        StorageError: the disk refused.
    """
    folder = home / "release"
    text = render_page(release, entries, broken_glass(home))
    page = folder / f"{release.release_id}.html"
    write_atomically(page, text)
    write_atomically(folder / f"{release.model}.html", text)
    return page


def render_page(
    release: ReleaseSummary, entries: Sequence[Entry], broken_glass: Sequence[str] = ()
) -> str:
    """The whole page, self-contained: no script and no address that a browser would load."""
    evidence = newest_evidence(entries)
    template = page_environment().get_template("release.html.j2")
    return template.render(
        release=release,
        entries=entries,
        evidence=evidence,
        broken_glass=broken_glass,
        names=NAMES,
        answered=_answered(evidence),
        strip=steps_strip(release, entries),
        charts=charts(release, entries),
    )


def newest_evidence(entries: Sequence[Entry]) -> Evidence | None:
    """What the last evaluation cycle saw."""
    return next((entry.evidence for entry in reversed(entries) if entry.evidence), None)


def picture(release: ReleaseSummary, entries: Sequence[Entry]) -> str:
    """The picture for the Prefect UI, as an image address: the metric that says most."""
    drawn = charts(release, entries)
    chosen = next((drawn[name] for name in NAMES if name in drawn), None)
    return as_data_url(chosen if chosen is not None else steps_strip(release, entries))


def charts(release: ReleaseSummary, entries: Sequence[Entry]) -> dict[MetricName, Markup]:
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
    xs = [hours * per_hour for hours, _ in points]
    alike, last = NO_HARM[metric], points[-1][1]
    bottom, top = _range(metric, last)
    with canvas(520, 260, (60, 16, 40, 48)) as drawing:
        axes = drawing.axes
        lower = [f.low or 0.0 for _, f in points]
        upper = [top if f.high is None else f.high for _, f in points]
        axes.fill_between(xs, lower, upper, color=WASH, linewidth=0)
        axes.axhline(alike, **BASELINE)
        drawing.beside(alike, "alike", 0, ha="right", va="bottom", color=SOFT)
        middle = [f.estimate or 0.0 for _, f in points]
        axes.plot(xs, middle, **LINES[0])
        axes.plot(xs[-1:], middle[-1:], "o", color=WATER, clip_on=False)
        axes.set(xlim=(xs[0], max(xs[-1], xs[0] + 0.01)), ylim=(bottom, top))
        drawing.titles(f"{unit} since the start", last.unit)
        low, high = significant(last.low), significant(last.high)
        return drawing.svg(
            f"{NAMES[metric]}: bounds over time",
            f"{last.unit}, at the end between {low} and {high}; alike versions are at {alike:g}.",
        )


def _range(metric: MetricName, last: Finding) -> tuple[float, float]:
    """A range of which the newest bounds fill about a third; wider ones run off its edges."""
    ends = [NO_HARM[metric], last.estimate or 0.0, last.low or 0.0]
    ends += [last.high] if is_shown(last.high) else []
    low, high = min(ends), max(ends)
    reach = max(high - low, 0.01)
    return (low - reach if metric.startswith("task") else 0.0), high + reach


def steps_strip(release: ReleaseSummary, entries: Sequence[Entry]) -> Markup:
    """The share of the candidate over time, as steps of a stair."""
    end = release.closed_at or max((e.at for e in entries), default=release.step_since)
    total = max((end - release.opened_at).total_seconds(), 1.0) / 3600
    with canvas(1040, 118, (60, 16, 30, 26)) as drawing:
        axes = drawing.axes
        for period in release.periods:
            start = (period.since - release.opened_at).total_seconds() / 3600
            wide = ((period.until or end) - release.opened_at).total_seconds() / 3600 - start
            name, share = release.step_names[period.step], period.shares.candidate
            wide = max(wide, total / 500)
            colour = WATER if share else STONE
            (stair,) = axes.bar([start], [4 + share], wide, align="edge", color=colour)
            copies = f"copies of {period.shares.mirror:g} %"
            drawing.tip(stair, f"{name}: {share:g} % of the requests, {copies}")
            if wide > total / 16:
                drawing.note(name, (start, 4 + share), (4, 12))
        axes.set(xlim=(0, total), ylim=(0, 104), yticks=[])
        axes.set_xticks([0, total], ["0 h", f"{total:.1f} h"])
        axes.grid(visible=False)
        words = f"{len(release.periods)} steps in {total:.1f} hours."
        return drawing.svg("Share of the candidate over time", words, "flow")


def _answered(evidence: Evidence | None) -> list[tuple[str, Tally]]:
    if evidence is None:
        return []
    named = {"stable": evidence.stable, "candidate": evidence.candidate}
    return [*named.items(), ("candidate, copies", evidence.shadow)]
