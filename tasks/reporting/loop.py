"""The loop as a water channel with one basin a stage, and the windows of time it worked on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from markupsafe import Markup

from tasks.contracts.base import TimeWindow
from tasks.contracts.run import StageTime
from tasks.reporting.quantities import days, duration, is_shown, percent, shortened
from tasks.reporting.svg import label, line, picture, tag, text_width

MOST_STAGES_IN_A_ROW = 9
WIDTH = 1060.0
BASIN = 17.0


def loop_chart(stages: Sequence[StageTime], return_text: str) -> Markup:
    """Stages along the channel with time and reuse; the dashed line leads back to the first."""
    step = WIDTH / max(len(stages), 1)
    level, back = 74.0, 176.0
    ends = (step / 2, WIDTH - step / 2)
    parts = [
        tag("path", d=f"M {ends[0]:.1f} {level} H {ends[1]:.1f}", class_="channel"),
        *[_basin(s, i + 1, step * (i + 0.5), level, step) for i, s in enumerate(stages)],
    ]
    if len(stages) > 1:
        parts.append(_way_back(ends, level + 66, back, return_text))
    return picture("The loop", _told(stages, return_text), WIDTH, 196, *parts, kind="flow across")


def _basin(stage: StageTime, number: int, x: float, y: float, step: float) -> Markup:
    state = " reused" if stage.reused else ""
    longest = max(6, int(step / 7.2))
    return tag(
        "g",
        tag("title", _stage_told(stage)),
        tag("circle", cx=x, cy=y, r=BASIN, class_=f"basin{state}"),
        label(str(number), x, y + 4, anchor="middle", kind=f"numeral{state}"),
        label(shortened(stage.stage, longest), x, y - 32, anchor="middle", kind="strong"),
        label(duration(stage.seconds), x, y + 38, anchor="middle"),
        label("reused" if stage.reused else "ran", x, y + 54, anchor="middle", kind="faint"),
    )


def _way_back(ends: tuple[float, float], top: float, bottom: float, text: str) -> Markup:
    first, last = ends
    bend = 16
    path = (
        f"M {last:.1f} {top} V {bottom - bend} Q {last:.1f} {bottom} {last - bend:.1f} {bottom} "
        f"H {first + bend:.1f} Q {first:.1f} {bottom} {first:.1f} {bottom - bend} V {top + 6}"
    )
    arrow = f"{first - 5:.1f},{top + 6} {first + 5:.1f},{top + 6} {first:.1f},{top - 4}"
    middle = (first + last) / 2
    gap = text_width(text) + 8
    return tag(
        "g",
        tag("path", d=path, class_="return"),
        tag("polygon", points=arrow, class_="arrow"),
        tag("rect", x=middle - gap / 2, y=bottom - 10, width=gap, height=20.0, class_="backdrop"),
        label(text, middle, bottom + 4, anchor="middle", kind="faint"),
    )


def loop_chart_upright(stages: Sequence[StageTime], return_text: str) -> Markup:
    """The same for a narrow screen, or for many stages: the channel runs downward."""
    step, x, top = 56.0, 28.0, 30.0
    bottom = top + step * max(len(stages) - 1, 0)
    basins = []
    for i, stage in enumerate(stages):
        y, state = top + step * i, " reused" if stage.reused else ""
        words = f"{duration(stage.seconds)} · {'reused' if stage.reused else 'ran'}"
        basins.append(
            tag(
                "g",
                tag("title", _stage_told(stage)),
                tag("circle", cx=x, cy=y, r=BASIN, class_=f"basin{state}"),
                label(str(i + 1), x, y + 4, anchor="middle", kind=f"numeral{state}"),
                label(shortened(stage.stage, 34), x + 34, y - 2, kind="strong"),
                label(words, x + 34, y + 15, kind="faint"),
            )
        )
    return picture(
        "The loop",
        _told(stages, return_text),
        340,
        bottom + 64,
        tag("path", d=f"M {x} {top} V {bottom}", class_="channel"),
        *basins,
        label(f"↺ {return_text}", 12, bottom + 50, kind="faint"),
        kind="flow upright",
    )


def time_bar(stages: Sequence[StageTime]) -> Markup:
    """Where the time went: one bar, a piece for each stage."""
    timed = [s for s in stages if is_shown(s.seconds) and s.seconds > 0]
    total = sum(s.seconds for s in timed)
    parts: list[Markup] = []
    at = 0.0
    for stage in timed:
        wide = WIDTH * stage.seconds / total
        tip = f"{_stage_told(stage)}, {percent(stage.seconds / total)} of the time"
        shade = "bar soft s1" if stage.reused else "bar s1"
        box = {"x": at, "y": 22.0, "width": max(wide - 1.5, 0.5), "height": 20.0, "rx": 2.0}
        parts.append(tag("rect", tag("title", tip), class_=shade, **box))
        words = f"{stage.stage} {percent(stage.seconds / total, 0)}"
        if text_width(words) < wide:
            parts.append(label(words, at, 14, kind="faint"))
        at += wide
    return picture("Where the time went", _told(stages, ""), WIDTH, 44, *parts, kind="flow across")


def _stage_told(stage: StageTime) -> str:
    return f"{stage.stage}: {duration(stage.seconds)}, {'reused' if stage.reused else 'ran'}"


def _told(stages: Sequence[StageTime], return_text: str) -> str:
    return "; ".join([*map(_stage_told, stages), *([return_text] if return_text else [])])


def windows_chart(windows: Sequence[tuple[str, TimeWindow]]) -> Markup:
    """Windows under each other on one axis of time: nothing is judged on what it was trained on."""
    width, left, row, top = 1060.0, 132.0, 30.0, 8.0
    start = min(w.start for _, w in windows)
    end = max(w.end for _, w in windows)
    seconds = max((end - start).total_seconds(), 1.0)

    def place(moment: datetime) -> float:
        return left + (width - left - 40) * (moment - start).total_seconds() / seconds

    bottom = top + row * len(windows)
    parts = [
        tag(
            "g",
            line(place(m), top, place(m), bottom, "grid"),
            label(f"{m:%Y-%m-%d}", place(m), bottom + 17, anchor="middle", kind="tick"),
        )
        for m in _marks(start, end)
    ]
    for i, (name, window) in enumerate(windows):
        y, x = top + row * i, place(window.start)
        box = {"x": x, "y": y + 4, "width": max(place(window.end) - x, 2.0), "height": row - 8}
        parts.append(
            tag("rect", tag("title", f"{name}: {days(window)}"), rx=3.0, class_="span", **box)
        )
        parts.append(label(name, left - 12, y + row / 2 + 4, anchor="end", kind="strong"))
        parts.append(_span_words(days(window), x, box["width"], y + row / 2 + 4, width))
    told = "; ".join(f"{name} {days(window)}" for name, window in windows)
    return picture("Windows of time", told, width, bottom + 26, *parts, kind="flow")


def _span_words(text: str, x: float, wide: float, y: float, width: float) -> Markup:
    needed = text_width(text) + 16
    if needed < wide:
        return label(text, x + 8, y)
    if x + wide + needed < width:
        return label(text, x + wide + 8, y, kind="faint")
    return label(text, x - 8, y, anchor="end", kind="faint")


def _marks(start: datetime, end: datetime) -> list[datetime]:
    """At most eight moments: starts of every few months, or equal parts of a short span."""
    months = (end.year - start.year) * 12 + end.month - start.month
    if months < 3:
        return [start + (end - start) * k / 5 for k in range(6)]
    step = next((s for s in (1, 2, 3, 6, 12) if months / s <= 7), months // 7)
    first = start.year * 12 + start.month - 1
    starts = [_month_start(m) for m in range(first, first + months + 1) if (m - first) % step == 0]
    return [m for m in starts if start <= m <= end]


def _month_start(months: int) -> datetime:
    return datetime(months // 12, months % 12 + 1, 1, tzinfo=UTC)
