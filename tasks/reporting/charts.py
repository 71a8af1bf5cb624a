"""The charts of the pages: values in, SVG out; what is not finite is left out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.lines import Line2D

from tasks.contracts.data import MonitoredFeature
from tasks.contracts.evaluation import CurvePoint, EvaluationReport, RegressionMetrics
from tasks.reporting import drawing as draw
from tasks.reporting.facts import sized, with_label_unit
from tasks.reporting.quantities import count, decimal, is_shown, percent, shortened, significant

SQUARE = (344.0, 372.0)
ROW = 24.0
MOST_MARKED_POINTS = 40
NORMAL_95 = 1.959964


@dataclass(frozen=True)
class Series:
    """One named line."""

    name: str
    points: Sequence[draw.Point]

    def shown(self) -> list[draw.Point]:
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
    with draw.canvas() as drawing:
        axes, ends = drawing.axes, []
        for one, style in zip(series, draw.LINES, strict=False):
            points = one.shown()
            xs, ys = [x for x, _ in points], [y for _, y in points]
            axes.plot(xs, ys, label=one.name, **style)
            if points:
                ends.append(f"{one.name} goes from {decimal(ys[0])} to {decimal(ys[-1])}.")
            for x, y in points if len(points) <= MOST_MARKED_POINTS else ():
                (dot,) = axes.plot([x], [y], "o", color=style["color"])
                drawing.tip(dot, f"{one.name}: {significant(y, 4)} at {significant(x)}")
        every = [point for one in series for point in one.shown()]
        axes.set_xlim(draw.limits(*(x for x, _ in every), margin=0.02))
        axes.set_ylim(draw.limits(*(y for _, y in every), margin=0.08))
        drawing.titles(x_title, y_title)
        draw.whole_numbers(axes.xaxis)
        keys = [Line2D([], [], **style) for style in draw.LINES[: len(series)]]
        drawing.legend(keys, [one.name for one in series])
        if mark is not None:
            drawing.mark(*mark)
        return drawing.svg(title, f"{y_title} by {x_title}. {' '.join(ends)}")


def curve_chart(
    title: str, series: Series, x_title: str, y_title: str, guessing: tuple[draw.Point, draw.Point]
) -> Markup:
    """A curve in the unit square, such as ROC, and what guessing would give."""
    with draw.canvas(*SQUARE) as drawing:
        axes = drawing.axes
        (guess,) = axes.plot(*zip(*guessing, strict=True), **draw.BASELINE)
        points = series.shown()
        (line,) = axes.plot([x for x, _ in points], [y for _, y in points], **draw.LINES[0])
        axes.set(xlim=(0, 1), ylim=(0, 1))
        drawing.titles(x_title, y_title)
        drawing.legend([line, guess], [series.name, "guessing"])
        words = f"{y_title} against {x_title}. The dashed line is guessing."
        return drawing.svg(title, words, "square")


Bin = tuple[float, float, float, float, float, str]
"""Where it is, what is seen there, from and to; size of its dot, and what is shown on hover."""


def _bins_chart(
    title: str,
    bins: Sequence[Bin],
    reach: tuple[float, float],
    axes_titles: Sequence[str],
    seen: str,
    words: str,
) -> Markup:
    """What came true by what was said, bin by bin; on the diagonal all comes true."""
    with draw.canvas(*SQUARE) as drawing:
        axes = drawing.axes
        (perfect,) = axes.plot(reach, reach, **draw.BASELINE)
        for x, y, low, high, size, tip in bins:
            axes.vlines(x, low, high, colors=draw.WATER, linewidths=2)
            (dot,) = axes.plot([x], [y], "o", color=draw.WATER, ms=size)
            drawing.tip(dot, tip)
        axes.set(xlim=reach, ylim=reach)
        drawing.titles(*axes_titles)
        key = Line2D([], [], color=draw.WATER, marker="o", linewidth=2)
        drawing.legend([key, perfect], [seen, "perfect"])
        return drawing.svg(title, words, "square")


def calibration_chart(points: Sequence[CurvePoint]) -> Markup:
    """Observed rate by mean score with 95 % Wilson intervals; larger dots are of more rows.

    On the diagonal a score of 30 % comes true in 30 %.
    """
    shown = [p for p in points if all(map(is_shown, (p.x, p.y, p.weight)))]
    heaviest = max([p.weight for p in shown] + [1.0])
    bins: list[Bin] = []
    for p in shown:
        low, high = wilson_interval(p.y, p.weight)
        tip = f"mean score {percent(p.x)}, observed {percent(p.y)} "
        tip += f"[{percent(low)}, {percent(high)}] on {count(p.weight)} rows"
        size = 5 + 9 * math.sqrt(max(p.weight, 0.0) / heaviest)
        bins.append((p.x, p.y, low, high, size, tip))
    highest = max([max(x, high) for x, _, _, high, *_ in bins], default=1.0)
    reach = 0.0, min(1.0, 1.04 * max(highest, 1e-6))
    words = f"Observed rate by mean score in {len(shown)} bins; the dashed diagonal is perfect."
    titles = "mean score", "observed rate"
    return _bins_chart("Calibration", bins, reach, titles, "candidate, 95 % interval", words)


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
    title: str, rows: Sequence[Estimate], x_title: str, reference: tuple[float, str]
) -> Markup:
    """A dot and its interval for each row, with a line at what they are compared with."""
    notes = draw.CHARACTER_WIDTH * max([len(r.note) for r in rows] + [0]) + 20
    height = 34 + ROW * max(len(rows), 1) + 46
    with draw.canvas(
        520, height, (draw.name_width([r.name for r in rows]), notes, 34, 46)
    ) as drawing:
        axes = drawing.axes
        drawing.rows([r.name for r in rows])
        for n, row in enumerate(rows):
            if is_shown(row.low) and is_shown(row.high):
                axes.plot([row.low, row.high], [n, n], color=draw.WATER, linewidth=2)
            if is_shown(row.value):
                (dot,) = axes.plot([row.value], [n], "o", color=draw.WATER, ms=9)
                drawing.tip(dot, row.tip or f"{row.name}: {row.note}")
            drawing.beside(n, row.note, notes - 8, ha="right", color=draw.SOFT)
        values = [v for r in rows for v in (r.value, r.low, r.high)]
        axes.set_xlim(draw.limits(*values, reference[0]))
        drawing.reference(*reference)
        drawing.titles(x_title)
        words = f"{len(rows)} rows, each a value with its 95 % interval. {reference[1]}"
        return drawing.svg(title, words)


def trade_chart(
    title: str, x_title: str, y_title: str, rows: Sequence[tuple[float, Estimate]], words: str = ""
) -> Markup:
    """What each row costs against its value and interval; without a note it is a ring."""
    with draw.canvas(520, 270, (74, 14, 36, 48)) as drawing:
        axes = drawing.axes
        costs = [cost for cost, _ in rows]
        span = draw.limits(0, *(v for _, r in rows for v in (r.low, r.high)))
        axes.set(xscale="log", xlim=(min(costs) / 2, max(costs) * 5), ylim=span)
        names: list[tuple[float, float, float]] = []  # middle, height and half a width, pixels
        for n, (cost, row) in enumerate(sorted(rows, key=lambda row: row[0])):
            axes.plot([cost, cost], [row.low, row.high], color=draw.WATER, linewidth=2)
            fill = draw.WATER if row.note else "none"
            (dot,) = axes.plot(
                [cost], [row.value], "o", color=draw.WATER, ms=9, markerfacecolor=fill
            )
            drawing.tip(dot, row.tip)
            end, away = (row.low, -9) if n % 2 else (row.high, 9)  # neighbours are on either side
            (x, y), half = axes.transData.transform((cost, end)), 3.6 * len(row.name)
            while any(abs(x - u) < half + w and abs(y + away - v) < 13 for u, v, w in names):
                away += -4 if n % 2 else 4
            names.append((x, y + away, half))
            drawing.note(row.name, (cost, end), (0, away), ha="center")
        axes.axhline(0, **draw.BASELINE)
        drawing.titles(x_title, y_title)
        kinds = f"{len(rows)} variants; left is cheaper, up is better; rings were dropped."
        return drawing.svg(title, words or kinds)


def feature_charts(features: Sequence[MonitoredFeature]) -> Markup:
    """Median of each feature over time as a line, its middle nine tenths as a band; three a row."""
    wide, high, columns = 182, 134, 3
    height = -(-len(features) // columns) * high
    with draw.canvas(columns * wide, height, (0, 0, 0, 0)) as drawing:
        drawing.axes.set_axis_off()
        for n, one in enumerate(features):
            left, top = (n % columns) * wide, (n // columns) * high
            index = "no PSI" if one.psi is None else f"PSI {decimal(one.psi, 2)}"
            name = drawing.write(left, top + 8, shortened(one.feature, 25), fontweight="bold")
            drawing.tip(name, f"{one.view}: {one.feature}, {index}")
            colour = draw.BAD if one.drifted else draw.SOFT
            drawing.write(left, top + 22, f"{shortened(one.view, 17)} · {index}", color=colour)
            known = [p for p in one.periods if all(map(is_shown, (p.low, p.median, p.high)))]
            low, most = draw.limits(
                *(v for p in known for v in (p.low or 0, p.high or 0)), margin=0
            )
            for y, text in ((top + 37, most), (top + 124, low)):
                drawing.write(left + wide - 10, y, significant(text), ha="right", color=draw.SOFT)
            axes = drawing.add(left, top + 46, wide - 10, 70)
            axes.set(ylim=(low, most), xticks=[], yticks=[])
            axes.spines["bottom"].set_color(draw.STONE)
            starts = [p.start for p in known]
            band = [p.low for p in known], [p.high for p in known]
            axes.fill_between(starts, *band, color=draw.WATER, alpha=0.35, linewidth=0)  # type: ignore[arg-type]
            axes.plot(starts, [p.median for p in known], **draw.LINES[0])  # type: ignore[arg-type]
        words = "; ".join(f"{one.view} {one.feature}" for one in features)
        return drawing.svg("Features over time", words)


def observed_chart(report: EvaluationReport) -> Markup:
    """Labels by prediction: the mean of each bin, and where the middle four fifths are."""
    bands = [b for b in report.observed if all(map(is_shown, (b.x, b.low, b.high, b.mean)))]
    bins: list[Bin] = []
    for band in bands:
        tip = f"predicted {sized(band.x)}: observed {sized(band.mean)} on average, four in five "
        tip += f"from {sized(band.low)} to {sized(band.high)}, {count(band.num_rows)} rows"
        bins.append((band.x, band.mean, band.low, band.high, 9, tip))
    reach = draw.limits(*(v for b in bands for v in (b.x, b.low, b.high)), margin=0.04)
    titles = [with_label_unit(word, report) for word in ("predicted", "observed")]
    words = "Mean label by prediction in bins of equally many rows; the diagonal is perfect."
    title, seen = "Predicted against observed", "mean, middle 80 %"
    return _bins_chart(title, bins, reach, titles, seen, words)


def residual_chart(report: EvaluationReport) -> Markup:
    """How many rows have which error."""
    bars = [c for c in report.residuals if is_shown(c.x) and is_shown(c.weight)]
    with draw.canvas(*SQUARE) as drawing:
        axes = drawing.axes
        for part in bars:
            (bar,) = axes.bar([part.x], [part.weight], 0.94 * part.y, color=draw.WATER)
            drawing.tip(bar, f"{count(part.weight)} rows with an error about {sized(part.x)}")
        reach = max((abs(b.x) + b.y / 2 for b in bars), default=1.0)
        axes.set(xlim=(-reach, reach), ylim=(0, 1.05 * max([b.weight for b in bars] + [1.0])))
        drawing.titles(with_label_unit("predicted minus observed", report), "rows")
        if isinstance(report.overall, RegressionMetrics):
            bias = report.overall.bias.value
            drawing.mark(bias, f"mean {sized(bias)}")
        words = "Rows by error, prediction minus label; the outermost bars hold all that is beyond."
        return drawing.svg("Errors", words, "square")
