"""The charts of the pages: values in, SVG out; what is not finite is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.dates
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from tasks.contracts.base import TimeWindow
from tasks.contracts.evaluation import CurvePoint
from tasks.reporting.drawing import (
    BAD,
    BASELINE,
    CARD,
    CHARACTER_WIDTH,
    DROPPED,
    GRID,
    INK,
    LINES,
    LONGEST_NAME,
    SAND,
    SOFT,
    STONE,
    WASH,
    WATER,
    Canvas,
    Point,
    canvas,
    limits,
    name_width,
    whole_numbers,
)
from tasks.reporting.quantities import (
    count,
    days,
    decimal,
    factor,
    is_shown,
    milliseconds,
    percent,
    shortened,
    significant,
)

SQUARE = (344.0, 372.0)
ROW = 24.0
MOST_MARKED_POINTS = 40
NORMAL_95 = 1.959964
DATES: Any = matplotlib.dates
"""It has no types."""


@dataclass(frozen=True)
class Series:
    """One named line."""

    name: str
    points: Sequence[Point]

    def shown(self) -> list[Point]:
        """Points that can be drawn."""
        return [(x, y) for x, y in self.points if is_shown(x) and is_shown(y)]


@dataclass(frozen=True)
class Mark:
    """A place on the x axis worth a vertical line and words."""

    x: float
    text: str


def line_chart(
    title: str, series: Sequence[Series], x_title: str, y_title: str, mark: Mark | None = None
) -> Markup:
    """Lines over whole numbers, such as losses by epoch; `mark` points one number out."""
    with canvas() as drawing:
        axes, ends = drawing.axes, []
        for one, style in zip(series, LINES, strict=False):
            points = one.shown()
            xs, ys = [x for x, _ in points], [y for _, y in points]
            axes.plot(xs, ys, label=one.name, **style)
            if points:
                ends.append(f"{one.name} goes from {decimal(ys[0])} to {decimal(ys[-1])}.")
            for x, y in points if len(points) <= MOST_MARKED_POINTS else ():
                (dot,) = axes.plot([x], [y], "o", color=style["color"])
                drawing.tip(dot, f"{one.name}: {significant(y, 4)} at {significant(x)}")
        every = [point for one in series for point in one.shown()]
        axes.set_xlim(limits(*(x for x, _ in every), margin=0.02))
        axes.set_ylim(limits(*(y for _, y in every), margin=0.08))
        drawing.titles(x_title, y_title)
        whole_numbers(axes.xaxis)
        keys = [Line2D([], [], **style) for style in LINES[: len(series)]]
        drawing.legend(keys, [one.name for one in series])
        if mark is not None:
            drawing.mark(mark.x, mark.text)
        return drawing.svg(title, f"{y_title} by {x_title}. {' '.join(ends)}")


def curve_chart(
    title: str,
    series: Series,
    x_title: str,
    y_title: str,
    *,
    baseline: tuple[Point, Point],
    baseline_text: str,
) -> Markup:
    """A curve in the unit square, such as ROC; the baseline is what guessing would give."""
    with canvas(*SQUARE) as drawing:
        axes = drawing.axes
        (guess,) = axes.plot(*zip(*baseline, strict=True), **BASELINE)
        points = series.shown()
        (line,) = axes.plot([x for x, _ in points], [y for _, y in points], **LINES[0])
        axes.set(xlim=(0, 1), ylim=(0, 1))
        drawing.titles(x_title, y_title)
        drawing.legend([line, guess], [series.name, baseline_text])
        words = f"{y_title} against {x_title}. The dashed line is {baseline_text}."
        return drawing.svg(title, words, "square")


def calibration_chart(title: str, points: Sequence[CurvePoint]) -> Markup:
    """Observed rate by mean score with 95 % Wilson intervals, and how many rows each bin holds.

    Marks are as large as their rows are many; on the diagonal a score of 30 % comes true in 30 %.
    """
    shown = [p for p in points if all(map(is_shown, (p.x, p.y, p.weight)))]
    bounds = [wilson_interval(p.y, p.weight) for p in shown]
    highest = max([p.x for p in shown] + [high for _, high in bounds], default=1.0)
    heaviest = max([p.weight for p in shown] + [1.0])
    left, right, top, bottom = 54, 14, 66, 48
    width, height = SQUARE
    with canvas(width, height, (left, right, top, bottom + 52)) as drawing:
        axes = drawing.axes
        rows = drawing.add(left, height - bottom - 26, width - left - right, 42)
        (perfect,) = axes.plot([0, 2], [0, 2], **BASELINE)
        for p, (low, high) in zip(shown, bounds, strict=True):
            share = max(p.weight, 0.0) / heaviest
            axes.vlines(p.x, low, high, colors=WATER, linewidths=2)
            (dot,) = axes.plot([p.x], [p.y], "o", color=WATER, ms=5 + 9 * math.sqrt(share))
            drawing.tip(
                dot,
                f"mean score {percent(p.x)}, observed {percent(p.y)} "
                f"[{percent(low)}, {percent(high)}] on {count(p.weight)} rows",
            )
            (bar,) = rows.bar([p.x], [share], color=WATER, alpha=0.35, width=highest / 40)
            drawing.tip(bar, f"{count(p.weight)} rows at a mean score of {percent(p.x)}")
        reach = min(1.0, 1.04 * max(highest, 1e-6))
        axes.set(xlim=(0, reach), ylim=(0, reach))
        drawing.titles("", "observed rate")
        rows.set(xlim=(0, reach), ylim=(0, 1.02), yticks=[], xticks=[])
        rows.set_xlabel("mean score")
        rows.set_ylabel("rows", rotation=0, ha="right", va="center", labelpad=6)
        key = Line2D([], [], color=WATER, marker="o", linewidth=2)
        drawing.legend([key, perfect], ["candidate, 95 % interval", "perfect"])
        return drawing.svg(
            title,
            f"Observed rate by mean score in {len(shown)} bins; the dashed diagonal is perfect. "
            f"Below it the rows of each bin, {count(heaviest)} at most.",
            "square",
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


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; `note` is at the right, `tip` is shown on hover."""

    name: str
    value: float
    low: float
    high: float
    note: str = ""
    tip: str = ""


def interval_chart(
    title: str,
    rows: Sequence[Estimate],
    x_title: str,
    *,
    reference: float | None = None,
    reference_text: str = "",
    note_below: bool = False,
) -> Markup:
    """A dot and its interval for each row, with a line at what they are compared with.

    Notes are at the right, or below the names where they are long.
    """
    step, top, bottom = ROW + 16 * note_below, 34.0, 46.0
    notes = CHARACTER_WIDTH * max([len(r.note) for r in rows] + [0])
    names = name_width([r.name for r in rows])
    left, right = (max(names, notes + 16), 36.0) if note_below else (names, notes + 20)
    height = top + step * max(len(rows), 1) + bottom
    with canvas(520, height, (left, right, top, bottom)) as drawing:
        axes = drawing.axes
        drawing.rows([r.name for r in rows], align="bottom" if note_below else "center")
        for n, row in enumerate(rows):
            if is_shown(row.low) and is_shown(row.high):
                axes.plot([row.low, row.high], [n, n], color=WATER, linewidth=2)
            if is_shown(row.value):
                (dot,) = axes.plot([row.value], [n], "o", color=WATER, ms=9)
                drawing.tip(dot, row.tip or f"{row.name}: {row.note}")
            if note_below:
                drawing.write(
                    left - 8, top + step * (n + 0.5) + 9, row.note, ha="right", color=SOFT
                )
            else:
                drawing.beside(n, row.note, notes + 12, ha="right", color=SOFT)
        values = [v for r in rows for v in (r.value, r.low, r.high)]
        axes.set_xlim(limits(*values, *([] if reference is None else [reference])))
        drawing.reference(reference, reference_text)
        drawing.titles(x_title)
        words = f"{len(rows)} rows, each a value with its 95 % interval. {reference_text}"
        return drawing.svg(title, words.strip())


@dataclass(frozen=True)
class Effect:
    """How far one feature moved: `low` is the lower bound of `size`, both between 0 and 1."""

    name: str
    size: float
    low: float
    drifted: bool
    columns: tuple[str, ...]
    tip: str = ""


def effect_chart(
    title: str, rows: Sequence[Effect], headings: Sequence[str], threshold: float | None = None
) -> Markup:
    """Bars from zero: solid to the lower bound, pale to the estimate; columns at the right."""
    column, top, bottom = 84.0, 46.0, 46.0
    right = column * len(headings) + 8
    height = top + ROW * max(len(rows), 1) + bottom
    names = [f"▲ {r.name}" if r.drifted else r.name for r in rows]  # known without colour too
    with canvas(690, height, (name_width(names) + 14, right, top, bottom)) as drawing:
        axes = drawing.axes
        drawing.rows(names, [r.tip or r.name for r in rows], [r.drifted for r in rows])
        for n, row in enumerate(rows):
            colour = SAND if row.drifted else STONE
            for value, opacity in ((row.size, 0.35), (row.low, 1.0 if row.drifted else 0.55)):
                if is_shown(value) and value > 0:
                    (bar,) = axes.barh([n], [value], 0.58, color=colour, alpha=opacity)
                    drawing.tip(bar, row.tip)
            for place, text in enumerate(row.columns, start=1):
                drawing.beside(n, text, column * place, ha="right")
        for place, heading in enumerate(headings, start=1):
            at = 690 - right + column * place
            drawing.write(at, top - 12, heading, ha="right", color=SOFT)
        largest = max([r.size for r in rows if is_shown(r.size)] + [threshold or 0.0, 0.01])
        axes.set_xlim(0, largest * 1.04)
        text = "" if threshold is None else f"threshold {decimal(threshold, 2)}"
        drawing.reference(threshold, text)
        drawing.titles("effect size, 0 to 1 (solid: at least, pale: estimate)")
        moved = sum(r.drifted for r in rows)
        words = f"{len(rows)} features by size of change; {moved} have drifted."
        return drawing.svg(title, words, "wide")


@dataclass(frozen=True)
class Latency:
    """Median latency of one variant at one batch size; `ratio` is against PyTorch eager."""

    variant: str
    batch_rows: int
    p50_ms: float
    p95_ms: float
    ratio: float
    kept: bool


def latency_chart(title: str, rows: Sequence[Latency]) -> Markup:
    """Bars on a logarithmic axis, grouped by batch size; dropped variants are outlined."""
    ordered: list[Latency | int] = []
    for size in sorted({r.batch_rows for r in rows}):
        group = [r for r in rows if r.batch_rows == size]
        ordered += [size, *sorted(group, key=lambda r: r.p50_ms)]
    names = [row.variant if isinstance(row, Latency) else "" for row in ordered]
    measured = [r.p50_ms for r in rows if is_shown(r.p50_ms) and r.p50_ms > 1e-12] or [1.0]
    low = 10.0 ** math.floor(math.log10(min(measured)) - 0.05)
    height = 66 + ROW * max(len(ordered), 1)
    with canvas(760, height, (name_width(names), 176, 20, 46)) as drawing:
        axes = drawing.axes
        axes.set_xscale("log")
        axes.set_xlim(low, max(10 * low, 10.0 ** math.ceil(math.log10(max(measured)) + 0.05)))
        drawing.rows(names)
        for n, row in enumerate(ordered):
            if isinstance(row, Latency):
                _latency_bar(drawing, row, n, low)
            else:
                text = f"batch of {row:,} {'row' if row == 1 else 'rows'}"
                drawing.note(text, (low, n), fontweight="bold")
        drawing.titles("median latency in ms, logarithmic (shorter is faster)")
        variants, sizes = {r.variant for r in rows}, {r.batch_rows for r in rows}
        words = f"{len(variants)} variants at {len(sizes)} batch sizes, medians."
        return drawing.svg(title, words, "wide")


def _latency_bar(drawing: Canvas, row: Latency, n: int, low: float) -> None:
    if not is_shown(row.p50_ms) or row.p50_ms <= 0:
        drawing.note("not measured", (low, n), color=SOFT)
        return
    style = {"color": WATER} if row.kept else DROPPED
    (bar,) = drawing.axes.barh([n], [max(row.p50_ms - low, 0.0)], 0.58, left=low, **style)
    drawing.tip(
        bar,
        f"{row.variant} ({'kept' if row.kept else 'dropped'}), {row.batch_rows:,} rows: median "
        f"{milliseconds(row.p50_ms)}, 95 % of requests within {milliseconds(row.p95_ms)}, "
        f"{factor(row.ratio)} of PyTorch eager",
    )
    words = f"{milliseconds(row.p50_ms)} · {factor(row.ratio)} eager"
    drawing.note(words, (row.p50_ms, n), (8, 0), color=SOFT)


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
    """What a request costs against what the variant does to the metric; dropped ones outlined.

    A chosen variant's name is strong and marked, so that colour is not needed.
    """
    margins = (66, name_width([p.name for p in points]) + 18, 40, 48)
    with canvas(520, 300, margins) as drawing:
        axes = drawing.axes
        axes.set_xscale("log")
        costs = [p.cost for p in points if is_shown(p.cost) and p.cost > 1e-12] or [1.0]
        axes.set_xlim(min(costs) / 2, max(costs) * 2)
        axes.set_ylim(limits(0.0, *(v for p in points for v in (p.change, p.low, p.high))))
        axes.axhline(0.0, **BASELINE)
        low, high = axes.get_ylim()
        ordered = sorted(points, key=lambda p: -p.change)
        heights = _apart([p.change for p in ordered], low, high, (high - low) * 16 / 212)
        for point, height in zip(ordered, heights, strict=True):
            _trade(drawing, point, height)
        drawing.titles(x_title, y_title)
        chosen = sum(p.chosen for p in points)
        return drawing.svg(
            title,
            f"{len(points)} variants; {chosen} of them are chosen for a goal. "
            "The dashed line is the source itself.",
        )


def _apart(wanted: Sequence[float], low: float, high: float, gap: float) -> list[float]:
    """Heights for names, in the given order from the top, near where they are wanted."""
    found: list[float] = []
    for height in wanted:
        found.append(min(height, found[-1] - gap) if found else min(height, high))
    under = max(low - found[-1], 0.0) if found else 0.0
    return [height + under for height in found]


def _trade(drawing: Canvas, point: Trade, height: float) -> None:
    axes = drawing.axes
    if is_shown(point.low) and is_shown(point.high):
        axes.vlines(point.cost, point.low, point.high, colors=WATER, linewidths=2)
    edge: dict[str, Any] = (
        {"color": WATER} if point.kept else {"mfc": CARD, "mec": STONE, "color": STONE}
    )
    (dot,) = axes.plot([point.cost], [point.change], "o", ms=10, **edge)
    drawing.tip(dot, point.tip)
    name = shortened(point.name, LONGEST_NAME)
    words = axes.annotate(
        f"★ {name}" if point.chosen else name, (point.cost, point.change), xytext=(1.04, height),
        textcoords=axes.get_yaxis_transform(), va="center", annotation_clip=False,
        fontweight="bold" if point.chosen else "normal", color=INK if point.kept else SOFT,
        arrowprops={"arrowstyle": "-", "color": GRID, "shrinkA": 0, "shrinkB": 0},
    )  # fmt: skip
    drawing.tip(words, point.tip)


def windows_chart(windows: Sequence[tuple[str, TimeWindow]]) -> Markup:
    """Windows under each other on one axis of time: nothing is judged on what it was trained on."""
    height = 36 + 30.0 * len(windows)
    with canvas(1060, height, (132, 40, 8, 28)) as drawing:
        axes = drawing.axes
        drawing.rows([name for name, _ in windows], strong=[True] * len(windows))
        ends = [DATES.date2num(moment) for _, w in windows for moment in (w.start, w.end)]
        first, last = min(ends), max(max(ends), min(ends) + 1e-5)
        axes.set_xlim(first, last)
        for n, (name, window) in enumerate(windows):
            start, end = DATES.date2num(window.start), DATES.date2num(window.end)
            wide = max(end - start, (last - first) / 500)
            (bar,) = axes.barh(
                [n], [wide], 0.74, left=start, color=WASH, edgecolor=WATER, clip_on=False
            )
            drawing.tip(bar, f"{name}: {days(window)}")
            _span_words(drawing, days(window), (start, start + wide, n), (first, last))
        axes.xaxis.set_major_locator(DATES.AutoDateLocator(minticks=3, maxticks=8))
        axes.xaxis.set_major_formatter(DATES.DateFormatter("%Y-%m-%d"))
        words = "; ".join(f"{name} {days(window)}" for name, window in windows)
        return drawing.svg("Windows of time", words, "flow")


def _span_words(
    drawing: Canvas, text: str, span: tuple[float, float, int], bounds: tuple[float, float]
) -> None:
    """Inside the bar where there is room, else at its right, else at its left."""
    start, end, n = span
    needed = (bounds[1] - bounds[0]) * (CHARACTER_WIDTH * len(text) + 16) / 888
    at, offset, side, colour = start, 8, "left", INK
    if needed > end - start:
        at, colour = end, SOFT
        if end + needed > bounds[1]:
            at, offset, side = start, -8, "right"
    drawing.note(text, (at, n), (offset, 0), ha=side, color=colour)


@dataclass(frozen=True)
class Cell:
    """One of many small charts: a band, and a line of its own scale, over the same periods."""

    name: str
    note: str
    tip: str
    band: Sequence[tuple[float, float]]
    """Lower and upper edge of each period; NaN where nothing is known."""
    line: Sequence[float]
    bounds: tuple[float, float]
    edges: tuple[str, str]
    """What is written at the lower and the upper edge."""
    line_top: float | None = None
    """The line's own upper edge, where it has one: its unit differs from the band's."""
    bad: bool = False


def multiples(title: str, description: str, cells: Sequence[Cell], window: TimeWindow) -> Markup:
    """Small charts side by side, three in a row, over the same window of time."""
    wide, high, gap, columns = 172.0, 134.0, 10.0, 3
    width, bottom = columns * (wide + gap), -(-len(cells) // columns) * high
    with canvas(width, bottom + 22, (0, 0, 0, 0)) as drawing:
        drawing.axes.set_axis_off()
        for n, cell in enumerate(cells):
            left, top = (n % columns) * (wide + gap), (n // columns) * high
            name = drawing.write(left, top + 8, shortened(cell.name, 25), fontweight="bold")
            drawing.tip(name, cell.tip)
            drawing.write(left, top + 22, cell.note, color=BAD if cell.bad else SOFT)
            low, high_edge = cell.edges
            for y, text in ((top + 37, high_edge), (top + 124, low)):
                drawing.write(left + wide, y, text, ha="right", color=SOFT)
            _small_chart(drawing.add(left, top + 46, wide, 70), cell)
        drawing.write(0, bottom + 11, f"{window.start:%Y-%m-%d}", color=SOFT)
        drawing.write(width - gap, bottom + 11, f"{window.end:%Y-%m-%d}", ha="right", color=SOFT)
        return drawing.svg(title, description)


def _small_chart(axes: Axes, cell: Cell) -> None:
    xs = np.arange(len(cell.line))
    band = np.array(cell.band, dtype=np.float64).reshape(-1, 2)
    axes.fill_between(xs[: len(band)], band[:, 0], band[:, 1], color=WATER, alpha=0.35, linewidth=0)
    axes.set(xticks=[], yticks=[], ylim=cell.bounds)
    over, style = axes, LINES[0]
    if cell.line_top is not None:
        over, style = axes.twinx(), LINES[1]
        over.set(ylim=(0, cell.line_top), yticks=[])
    over.plot(xs, cell.line, clip_on=False, **style)


def scatter_square(
    title: str, description: str, titles: tuple[str, str], bands: Sequence[Any], tips: Sequence[str]
) -> Markup:
    """Means with a whisker at each x, around the diagonal: `bands` have x, low, mean and high."""
    with canvas(*SQUARE) as drawing:
        axes = drawing.axes
        bounds = limits(*(v for b in bands for v in (b.x, b.low, b.high)), margin=0.04)
        (perfect,) = axes.plot(bounds, bounds, **BASELINE)
        for band, tip in zip(bands, tips, strict=True):
            axes.vlines(band.x, band.low, band.high, colors=WATER, linewidths=2)
            (dot,) = axes.plot([band.x], [band.mean], "o", color=WATER, ms=9)
            drawing.tip(dot, tip)
        axes.set(xlim=bounds, ylim=bounds)
        drawing.titles(*titles)
        key = Line2D([], [], color=WATER, marker="o", linewidth=2)
        drawing.legend([key, perfect], ["mean, middle 80 %", "perfect"])
        return drawing.svg(title, description, "square")


def histogram(
    title: str,
    description: str,
    x_title: str,
    bars: Sequence[CurvePoint],
    tips: Sequence[str],
    mark: Mark | None,
) -> Markup:
    """Bars of `weight` rows around `x`, `y` wide."""
    with canvas(*SQUARE) as drawing:
        axes = drawing.axes
        for part, tip in zip(bars, tips, strict=True):
            (bar,) = axes.bar([part.x], [part.weight], 0.94 * part.y, color=WATER)
            drawing.tip(bar, tip)
        reach = max((abs(b.x) + b.y / 2 for b in bars), default=1.0)
        axes.set(xlim=(-reach, reach), ylim=(0, 1.05 * max([b.weight for b in bars] + [1.0])))
        drawing.titles(x_title, "rows")
        if mark is not None:
            drawing.mark(mark.x, mark.text)
        return drawing.svg(title, description, "square")
