"""Line, curve and calibration charts: values in, SVG out; what is not finite is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tasks.contracts.evaluation import CurvePoint
from tasks.reporting.axes import Frame, Linear, domain, round_up
from tasks.reporting.quantities import count, decimal, is_shown, percent, significant
from tasks.reporting.svg import label, line, picture, tag, text_width

WIDTH = 520.0
HEIGHT = 300.0
SQUARE_WIDTH, SQUARE_HEIGHT = 344.0, 372.0
LEFT, RIGHT, TOP, BOTTOM = 54.0, 14.0, 66.0, 48.0
MOST_MARKED_POINTS = 40
NORMAL_95 = 1.959964
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One named line; `style` is 1 (solid), 2 (dashed) or 3 (dotted), told apart without colour."""

    name: str
    points: Sequence[Point]
    style: int = 1


@dataclass(frozen=True)
class Mark:
    """A place on the x axis worth a vertical line and words."""

    x: float
    text: str


def line_chart(
    title: str,
    series: Sequence[Series],
    x_title: str,
    y_title: str,
    *,
    mark: Mark | None = None,
) -> Markup:
    """Lines over whole numbers, such as losses by epoch; `mark` points one number out."""
    shown = [_drawable(s) for s in series]
    frame = _line_frame([p for s in shown for p in s.points])
    drawn = [_line(s, frame, marked=len(s.points) <= MOST_MARKED_POINTS) for s in shown]
    return picture(
        title,
        f"{y_title} by {x_title}. {_ends(shown)}",
        WIDTH,
        HEIGHT,
        frame.grid(x_title, y_title),
        _vertical_mark(mark, frame) if mark else "",
        *drawn,
        _legend(shown),
    )


def _line_frame(points: Sequence[Point]) -> Frame:
    low_x, high_x = domain((x for x, _ in points), margin=0.02)
    low_y, high_y = domain((y for _, y in points), margin=0.08)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    return Frame(
        x=Linear(low_x, high_x, LEFT, right, num_ticks=10, whole_numbers=True),
        y=Linear(low_y, high_y, bottom, TOP),
        left=LEFT,
        top=TOP,
        right=right,
        bottom=bottom,
    )


def _vertical_mark(mark: Mark, frame: Frame) -> Markup:
    at = frame.x(mark.x)
    half = text_width(mark.text) / 2
    centre = min(max(at, frame.left + half), frame.right - half)
    words = label(mark.text, centre, frame.top - 8, anchor="middle", kind="mark-text")
    return tag("g", line(at, frame.top - 4, at, frame.bottom, "mark"), words)


def curve_chart(
    title: str,
    series: Sequence[Series],
    x_title: str,
    y_title: str,
    *,
    baseline: tuple[Point, Point],
    baseline_text: str,
) -> Markup:
    """Curves in the unit square, such as ROC; the baseline is what guessing would give."""
    shown = [_drawable(s) for s in series]
    frame = _square_frame(1.0)
    (x1, y1), (x2, y2) = baseline
    guess = line(frame.x(x1), frame.y(y1), frame.x(x2), frame.y(y2), "baseline")
    return picture(
        title,
        f"{y_title} against {x_title}. The dashed line is {baseline_text}.",
        SQUARE_WIDTH,
        SQUARE_HEIGHT,
        frame.grid(x_title, y_title),
        guess,
        *[_line(s, frame, marked=False) for s in shown],
        _legend(shown, baseline_text),
        kind="square",
    )


def _square_frame(top_value: float, bottom: float = SQUARE_HEIGHT - BOTTOM) -> Frame:
    right = SQUARE_WIDTH - RIGHT
    return Frame(
        x=Linear(0.0, top_value, LEFT, right),
        y=Linear(0.0, top_value, bottom, TOP),
        left=LEFT,
        top=TOP,
        right=right,
        bottom=bottom,
    )


def calibration_chart(title: str, points: Sequence[CurvePoint]) -> Markup:
    """Observed rate by mean score with 95 % Wilson intervals, and how many rows each bin holds.

    Marks are as large as their rows are many; on the diagonal a score of 30 % comes true in 30 %.
    """
    shown = [p for p in points if is_shown(p.x) and is_shown(p.y) and is_shown(p.weight)]
    intervals = [wilson_interval(p.y, p.weight) for p in shown]
    highest = max([p.x for p in shown] + [high for _, high in intervals], default=1.0)
    top_value = min(1.0, round_up(highest))
    frame = _square_frame(top_value, bottom=SQUARE_HEIGHT - BOTTOM - 52)
    heaviest = max([p.weight for p in shown] + [1.0])
    diagonal = line(frame.left, frame.bottom, frame.right, frame.top, "baseline")
    marks = [
        _calibration_mark(p, bounds, heaviest, frame)
        for p, bounds in zip(shown, intervals, strict=True)
    ]
    return picture(
        title,
        f"Observed rate by mean score in {len(shown)} bins; the dashed diagonal is perfect. "
        f"Below it the rows of each bin, {count(heaviest)} at most.",
        SQUARE_WIDTH,
        SQUARE_HEIGHT,
        frame.grid("", "observed rate"),
        diagonal,
        *marks,
        _rows_by_score(shown, heaviest, frame),
        _legend([Series("candidate, 95 % interval", [], 1)], "perfect"),
        kind="square",
    )


def wilson_interval(rate: float, num_rows: float) -> tuple[float, float]:
    """95 % interval of a rate seen on `num_rows` rows (Wilson, 1927); (0, 1) below one row."""
    if num_rows < 1:
        return 0.0, 1.0
    share = min(max(rate, 0.0), 1.0)
    z2 = NORMAL_95**2
    centre = (share + z2 / (2 * num_rows)) / (1 + z2 / num_rows)
    spread = math.sqrt(share * (1 - share) / num_rows + z2 / (4 * num_rows**2))
    half = NORMAL_95 * spread / (1 + z2 / num_rows)
    return max(0.0, centre - half), min(1.0, centre + half)


def _calibration_mark(
    point: CurvePoint, bounds: tuple[float, float], heaviest: float, frame: Frame
) -> Markup:
    at = frame.x(point.x)
    radius = 2.5 + 4.5 * math.sqrt(max(point.weight, 0.0) / heaviest)
    tip = (
        f"mean score {percent(point.x)}, observed {percent(point.y)} "
        f"[{percent(bounds[0])}, {percent(bounds[1])}] on {count(point.weight)} rows"
    )
    whisker = line(at, frame.y(bounds[0]), at, frame.y(bounds[1]), "whisker s1")
    dot = tag("circle", tag("title", tip), cx=at, cy=frame.y(point.y), r=radius, class_="dot s1")
    return tag("g", whisker, dot)


def _rows_by_score(points: Sequence[CurvePoint], heaviest: float, frame: Frame) -> Markup:
    base, tallest = SQUARE_HEIGHT - 22, 42.0
    bars = [
        tag(
            "rect",
            tag("title", f"{count(p.weight)} rows at a mean score of {percent(p.x)}"),
            x=frame.x(p.x) - 4,
            y=base - tallest * max(p.weight, 0.0) / heaviest,
            width=8.0,
            height=tallest * max(p.weight, 0.0) / heaviest,
            class_="bar soft s1",
        )
        for p in points
    ]
    middle = (frame.left + frame.right) / 2
    return tag(
        "g",
        *bars,
        line(frame.left, base, frame.right, base, "axis"),
        label("rows", frame.left - 6, base - 4, anchor="end", kind="tick"),
        label("mean score", middle, base + 18, anchor="middle", kind="axis-title"),
    )


def _drawable(series: Series) -> Series:
    points = [(x, y) for x, y in series.points if is_shown(x) and is_shown(y)]
    return Series(series.name, points, series.style)


def _line(series: Series, frame: Frame, *, marked: bool) -> Markup:
    pixels = [(frame.x(x), frame.y(y)) for x, y in series.points]
    if not pixels:
        return Markup("")
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    parts = [tag("polyline", points=path, class_=f"line s{series.style}")]
    if marked:
        parts += [
            tag(
                "circle",
                tag(
                    "title", f"{series.name}: {significant(value[1], 4)} at {significant(value[0])}"
                ),
                cx=x,
                cy=y,
                r=3.0,
                class_=f"dot s{series.style}",
            )
            for (x, y), value in zip(pixels, series.points, strict=True)
        ]
    return tag("g", *parts)


def _legend(series: Sequence[Series], baseline_text: str = "") -> Markup:
    entries = [(s.name, f"line s{s.style}") for s in series]
    if baseline_text:
        entries.append((baseline_text, "baseline"))
    parts: list[Markup] = []
    at = 4.0
    for text, kind in entries:
        parts.append(line(at, 16, at + 20, 16, kind))
        parts.append(label(text, at + 26, 20))
        at += 26 + text_width(text) + 18
    return tag("g", *parts)


def _ends(series: Sequence[Series]) -> str:
    return " ".join(
        f"{s.name} goes from {decimal(s.points[0][1])} to {decimal(s.points[-1][1])}."
        for s in series
        if s.points
    )
