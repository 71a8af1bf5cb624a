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
from tasks.contracts.conversion import VariantLatency
from tasks.contracts.drift import FeatureDrift
from tasks.contracts.evaluation import CurvePoint, EvaluationReport, Metric, RegressionMetrics
from tasks.contracts.release import ModelVariant
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
from tasks.reporting.judgement import sized, with_label_unit
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


def line_chart(
    title: str,
    series: Sequence[Series],
    x_title: str,
    y_title: str,
    mark: tuple[float, str] | None = None,
) -> Markup:
    """Lines over whole numbers, such as losses by epoch; `mark` names one number."""
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
            drawing.mark(*mark)
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


def calibration_chart(points: Sequence[CurvePoint]) -> Markup:
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
            "Calibration",
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


def drift_chart(features: Sequence[FeatureDrift], threshold: float | None) -> Markup:
    """Bars from zero: solid to the lower bound, pale to the estimate; numbers at the right."""
    column, top, headings = 84.0, 46.0, ("effect", "PSI", "missing")
    right = column * len(headings) + 8
    height = top + ROW * max(len(features), 1) + 46
    names = [f"▲ {f.feature}" if f.drifted else f.feature for f in features]  # without colour too
    tips = [f"{f.feature} ({f.kind}): {f.evidence}" for f in features]
    with canvas(690, height, (name_width(names) + 14, right, top, 46)) as drawing:
        drawing.rows(names, tips, [f.drifted for f in features])
        for n, feature in enumerate(features):
            _drift_bars(drawing, n, feature, tips[n])
            missing = feature.missing_reference, feature.missing_current
            texts = (
                *(decimal(value, 3) for value in (feature.effect, feature.psi)),
                " → ".join(percent(share, 0) for share in missing),
            )
            for place, text in enumerate(texts, start=1):
                drawing.beside(n, text, column * place, ha="right")
        for place, heading in enumerate(headings, start=1):
            at = 690 - right + column * place
            drawing.write(at, top - 12, heading, ha="right", color=SOFT)
        largest = max([f.effect for f in features if is_shown(f.effect)] + [threshold or 0.0, 0.01])
        drawing.axes.set_xlim(0, largest * 1.04)
        text = "" if threshold is None else f"threshold {decimal(threshold, 2)}"
        drawing.reference(threshold, text)
        drawing.titles("effect size, 0 to 1 (solid: at least, pale: estimate)")
        moved = sum(f.drifted for f in features)
        words = f"{len(features)} features by size of change; {moved} have drifted."
        return drawing.svg("Drift by feature", words, "wide")


def _drift_bars(drawing: Canvas, n: int, feature: FeatureDrift, tip: str) -> None:
    solid = 1.0 if feature.drifted else 0.55
    for value, opacity in ((feature.effect, 0.35), (feature.effect_low, solid)):
        if is_shown(value) and value > 0:
            colour = SAND if feature.drifted else STONE
            (bar,) = drawing.axes.barh([n], [value], 0.58, color=colour, alpha=opacity)
            drawing.tip(bar, tip)


def latency_chart(variants: Sequence[ModelVariant]) -> Markup:
    """Bars on a logarithmic axis, grouped by batch size; dropped variants are outlined."""
    measured = [(variant, at) for variant in variants for at in variant.latencies]
    sizes = sorted({at.batch_rows for _, at in measured})
    ordered: list[tuple[ModelVariant, VariantLatency] | int] = []
    for size in sizes:
        group = [pair for pair in measured if pair[1].batch_rows == size]
        ordered += [size, *sorted(group, key=lambda pair: pair[1].p50_ms)]
    names = ["" if isinstance(row, int) else row[0].name for row in ordered]
    known = [at.p50_ms for _, at in measured if is_shown(at.p50_ms) and at.p50_ms > 1e-12] or [1.0]
    low = 10.0 ** math.floor(math.log10(min(known)) - 0.05)
    height = 66 + ROW * max(len(ordered), 1)
    with canvas(760, height, (name_width(names), 176, 20, 46)) as drawing:
        axes = drawing.axes
        axes.set_xscale("log")
        axes.set_xlim(low, max(10 * low, 10.0 ** math.ceil(math.log10(max(known)) + 0.05)))
        drawing.rows(names)
        for n, row in enumerate(ordered):
            if isinstance(row, int):
                text = f"batch of {row:,} {'row' if row == 1 else 'rows'}"
                drawing.note(text, (low, n), fontweight="bold")
            else:
                _latency_bar(drawing, *row, n, low)
        drawing.titles("median latency in ms, logarithmic (shorter is faster)")
        num_variants = len({variant.name for variant, _ in measured})
        words = f"{num_variants} variants at {len(sizes)} batch sizes, medians."
        return drawing.svg("Latency by variant", words, "wide")


def _latency_bar(
    drawing: Canvas, variant: ModelVariant, at: VariantLatency, n: int, low: float
) -> None:
    if not is_shown(at.p50_ms) or at.p50_ms <= 0:
        drawing.note("not measured", (low, n), color=SOFT)
        return
    style = {"color": WATER} if variant.accepted else DROPPED
    (bar,) = drawing.axes.barh([n], [max(at.p50_ms - low, 0.0)], 0.58, left=low, **style)
    drawing.tip(
        bar,
        f"{variant.name} ({_fate(variant)}), {at.batch_rows:,} rows: median "
        f"{milliseconds(at.p50_ms)}, 95 % of requests within {milliseconds(at.p95_ms)}, "
        f"{factor(at.ratio_to_eager)} of PyTorch eager",
    )
    words = f"{milliseconds(at.p50_ms)} · {factor(at.ratio_to_eager)} eager"
    drawing.note(words, (at.p50_ms, n), (8, 0), color=SOFT)


def _fate(variant: ModelVariant) -> str:
    return "kept" if variant.accepted else "dropped"


Trade = tuple[ModelVariant, float, Metric]
"""A variant, what a request or a million rows cost with it, and its change of the metric."""


def trade_chart(title: str, points: Sequence[Trade], x_title: str, metric: str) -> Markup:
    """What a request costs against what the variant does to the metric; dropped ones outlined.

    A chosen variant's name is strong and marked, so that colour is not needed.
    """
    margins = (66, name_width([v.name for v, _, _ in points]) + 18, 40, 48)
    with canvas(520, 300, margins) as drawing:
        axes = drawing.axes
        axes.set_xscale("log")
        costs = [cost for _, cost, _ in points if is_shown(cost) and cost > 1e-12] or [1.0]
        axes.set_xlim(min(costs) / 2, max(costs) * 2)
        bounds = [v for _, _, change in points for v in (change.value, change.low, change.high)]
        axes.set_ylim(limits(0.0, *bounds))
        axes.axhline(0.0, **BASELINE)
        low, high = axes.get_ylim()
        ordered = sorted(points, key=lambda point: -point[2].value)
        heights = _apart([p[2].value for p in ordered], low, high, (high - low) * 16 / 212)
        for point, height in zip(ordered, heights, strict=True):
            _trade(drawing, *point, height, metric)
        drawing.titles(x_title, f"{metric} change")
        chosen = sum(bool(variant.serves) for variant, _, _ in points)
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


def _trade(
    drawing: Canvas, variant: ModelVariant, cost: float, change: Metric, height: float, metric: str
) -> None:
    axes, chosen = drawing.axes, bool(variant.serves)
    if is_shown(change.low) and is_shown(change.high):
        axes.vlines(cost, change.low, change.high, colors=WATER, linewidths=2)
    edge: dict[str, Any] = {"color": WATER}
    if not variant.accepted:
        edge = {"mfc": CARD, "mec": STONE, "color": STONE}
    (dot,) = axes.plot([cost], [change.value], "o", ms=10, **edge)
    goals = f"chosen for {', '.join(variant.serves)}" if chosen else "not chosen"
    tip = (
        f"{variant.name} ({_fate(variant)}, {goals}): "
        f"{significant(cost)}, {metric} {decimal(change.value, 5)}"
    )
    drawing.tip(dot, tip)
    name = shortened(variant.name, LONGEST_NAME)
    words = axes.annotate(
        f"★ {name}" if chosen else name, (cost, change.value), xytext=(1.04, height),
        textcoords=axes.get_yaxis_transform(), va="center", annotation_clip=False,
        fontweight="bold" if chosen else "normal", color=INK if variant.accepted else SOFT,
        arrowprops={"arrowstyle": "-", "color": GRID, "shrinkA": 0, "shrinkB": 0},
    )  # fmt: skip
    drawing.tip(words, tip)


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
        drawing.axes.set(xlim=(0, width), ylim=(bottom + 22, 0))
        for n, cell in enumerate(cells):
            left, top = (n % columns) * (wide + gap), (n // columns) * high
            name = drawing.write(left, top + 8, shortened(cell.name, 25), fontweight="bold")
            drawing.tip(name, cell.tip)
            drawing.write(left, top + 22, cell.note, color=BAD if cell.bad else SOFT)
            low, high_edge = cell.edges
            for y, text in ((top + 37, high_edge), (top + 124, low)):
                drawing.write(left + wide, y, text, ha="right", color=SOFT)
            _small_chart(drawing.axes, cell, (left, left + wide), (top + 116, top + 46))
        drawing.write(0, bottom + 11, f"{window.start:%Y-%m-%d}", color=SOFT)
        drawing.write(width - gap, bottom + 11, f"{window.end:%Y-%m-%d}", ha="right", color=SOFT)
        return drawing.svg(title, description)


def _small_chart(axes: Axes, cell: Cell, across: Point, upright: Point) -> None:
    """One small chart in pixels of the whole picture: axes of its own would take thrice as long.

    Args:
        across: its left and right edge.
        upright: its lower and upper edge.
    """
    xs = np.linspace(*across, max(len(cell.line), 2))
    low, high = cell.bounds

    def heights(values: Any, least: float, most: float) -> Any:
        span = most - least or 1.0
        return upright[0] + (np.asarray(values, dtype=np.float64) - least) / span * np.diff(upright)

    band = heights(cell.band, low, high).reshape(-1, 2)
    axes.fill_between(xs[: len(band)], band[:, 0], band[:, 1], color=WATER, alpha=0.35, linewidth=0)
    axes.hlines(upright[0], *across, colors=STONE, linewidth=0.8)
    line, style = heights(cell.line, low, high), LINES[0]
    if cell.line_top is not None:
        line, style = heights(cell.line, 0, cell.line_top), LINES[1]
    axes.plot(xs[: len(line)], line, **style)


def observed_chart(report: EvaluationReport) -> Markup:
    """Labels by prediction: the mean of each bin, and where the middle four fifths are."""
    bands = [b for b in report.observed if all(map(is_shown, (b.x, b.low, b.high, b.mean)))]
    with canvas(*SQUARE) as drawing:
        axes = drawing.axes
        bounds = limits(*(v for b in bands for v in (b.x, b.low, b.high)), margin=0.04)
        (perfect,) = axes.plot(bounds, bounds, **BASELINE)
        for band in bands:
            axes.vlines(band.x, band.low, band.high, colors=WATER, linewidths=2)
            (dot,) = axes.plot([band.x], [band.mean], "o", color=WATER, ms=9)
            drawing.tip(
                dot,
                f"predicted {sized(band.x)}: observed {sized(band.mean)} on average, four in five "
                f"from {sized(band.low)} to {sized(band.high)}, {count(band.num_rows)} rows",
            )
        axes.set(xlim=bounds, ylim=bounds)
        titles = (with_label_unit(word, report) for word in ("predicted", "observed"))
        drawing.titles(*titles)
        key = Line2D([], [], color=WATER, marker="o", linewidth=2)
        drawing.legend([key, perfect], ["mean, middle 80 %", "perfect"])
        return drawing.svg(
            "Predicted against observed",
            f"Mean label by prediction in {len(bands)} bins of equally many rows, with the middle "
            "four fifths of the labels; the dashed diagonal is perfect.",
            "square",
        )


def residual_chart(report: EvaluationReport) -> Markup:
    """How many rows have which error."""
    bars = [c for c in report.residuals if is_shown(c.x) and is_shown(c.weight)]
    overall, rmse = report.overall, None
    with canvas(*SQUARE) as drawing:
        axes = drawing.axes
        for part in bars:
            (bar,) = axes.bar([part.x], [part.weight], 0.94 * part.y, color=WATER)
            drawing.tip(bar, f"{count(part.weight)} rows with an error about {sized(part.x)}")
        reach = max((abs(b.x) + b.y / 2 for b in bars), default=1.0)
        axes.set(xlim=(-reach, reach), ylim=(0, 1.05 * max([b.weight for b in bars] + [1.0])))
        drawing.titles(with_label_unit("predicted minus observed", report), "rows")
        if isinstance(overall, RegressionMetrics):
            rmse = overall.rmse.value
            drawing.mark(overall.bias.value, f"mean {sized(overall.bias.value)}")
        return drawing.svg(
            "Errors",
            "Rows by error, prediction minus label. The root of the mean squared error is "
            f"{significant(rmse)}; the outermost bars hold all that is beyond.",
            "square",
        )
