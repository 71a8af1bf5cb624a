"""The trade that variants make: what a call costs against what it does to the metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tasks.reporting.axes import Frame, Linear, Logarithmic, domain, powers_around
from tasks.reporting.quantities import is_shown, shortened
from tasks.reporting.svg import label, line, picture, tag, text_width

WIDTH, HEIGHT = 520.0, 300.0
LEFT, TOP, BOTTOM = 66.0, 40.0, 48.0
LONGEST_NAME = 24
NAME_ROW = 16.0


@dataclass(frozen=True)
class Trade:
    """One variant: `cost` is positive, the change of the metric has its 95 % interval."""

    name: str
    cost: float
    change: float
    low: float
    high: float
    kept: bool
    chosen: bool
    tip: str = ""


def trade_chart(title: str, points: Sequence[Trade], x_title: str, y_title: str) -> Markup:
    """A dot and its interval for each variant, names beside; dropped ones outlined.

    A chosen variant's name is strong and marked, so that colour is not needed.
    """
    names = max([text_width(shortened(p.name, LONGEST_NAME)) for p in points] + [0.0]) + 34
    right, bottom = WIDTH - names, HEIGHT - BOTTOM
    values = [v for p in points for v in (p.change, p.low, p.high)]
    frame = Frame(
        x=Logarithmic(*powers_around(p.cost for p in points), LEFT, right),
        y=Linear(*domain([*values, 0.0]), bottom, TOP),
        left=LEFT,
        top=TOP,
        right=right,
        bottom=bottom,
    )
    ordered = sorted(points, key=lambda p: -p.change)
    rows = _spread([frame.y(p.change) for p in ordered], TOP, bottom)
    zero = frame.y(0.0)
    return picture(
        title,
        f"{len(points)} variants; {sum(p.chosen for p in points)} of them are chosen for a goal. "
        "The dashed line is the source itself.",
        WIDTH,
        HEIGHT,
        frame.grid(x_title, y_title),
        line(frame.left, zero, frame.right, zero, "baseline"),
        *[_point(p, frame, row) for p, row in zip(ordered, rows, strict=True)],
    )


def _spread(wanted: Sequence[float], top: float, bottom: float) -> list[float]:
    """Heights for names, in the given order, near where they are wanted and apart."""
    rows: list[float] = []
    for height in wanted:
        rows.append(max(height, rows[-1] + NAME_ROW) if rows else max(height, top))
    over = rows[-1] - bottom if rows else 0.0
    return [row - over if over > 0 else row for row in rows]


def _point(point: Trade, frame: Frame, row: float) -> Markup:
    x, y = frame.x(point.cost), frame.y(point.change)
    parts = [line(x, y, frame.right + 8, row, "grid")]
    if is_shown(point.low) and is_shown(point.high):
        parts.append(line(x, frame.y(point.low), x, frame.y(point.high), "whisker s1"))
    kind = "dot s1" if point.kept else "bar dropped"
    parts.append(tag("circle", tag("title", point.tip), cx=x, cy=y, r=5.0, class_=kind))
    name = shortened(point.name, LONGEST_NAME)
    words = f"★ {name}" if point.chosen else name
    kind = "strong" if point.chosen else "label" if point.kept else "faint"
    parts.append(label(words, frame.right + 12, row + 4, kind=kind, tip=point.tip))
    return tag("g", *parts)
