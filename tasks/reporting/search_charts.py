"""The pictures of a search: history, learning curves, importance, slices, parallel coordinates."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tasks.contracts.training import SearchedField, StudyRecord, TrialRecord
from tasks.reporting.axes import Frame, Linear, Scale, domain
from tasks.reporting.quantities import decimal, is_shown, percent, shortened, significant
from tasks.reporting.svg import label, line, picture, tag, text_width

WIDTH, HEIGHT = 620.0, 320.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 16.0, 66.0, 48.0
ROW = 26.0
LONGEST_NAME = 24
CURVE_TOLERANCE = 0.02  # of AUC or R2: how far below the best the axis of the curves reaches, x 10
MOST_LINES = 200

KINDS = {"complete": "dot s1", "pruned": "dot s3", "failed": "dot s2"}


@dataclass(frozen=True)
class FieldScale:
    """Values of one searched field on an axis; a choice has a place for each of its values."""

    field: SearchedField
    start: float
    end: float

    def __call__(self, value: float | int | str) -> float:
        """Pixel of a value."""
        return self.start + self._share(value) * (self.end - self.start)

    def _share(self, value: float | int | str) -> float:
        if self.field.choices:
            places = len(self.field.choices)
            return (self.field.choices.index(str(value)) + 0.5) / places
        low, high = self._bounds()
        number = min(max(float(value), low), high)
        if self.field.log:
            return math.log(number / low) / math.log(high / low)
        return (number - low) / (high - low)

    def _bounds(self) -> tuple[float, float]:
        assert self.field.low is not None
        assert self.field.high is not None
        return self.field.low, self.field.high

    def ticks(self) -> list[tuple[float, str]]:
        """Places worth a grid line, and how they are written.

        Of a choice they are values all the same: `__call__` takes what `values` gives.
        """
        return [(value, text) for value, text in self.marks() if not isinstance(value, str)]

    def marks(self) -> list[tuple[float | str, str]]:
        """Every value of a choice, or round numbers and the bounds."""
        if self.field.choices:
            return [(choice, shortened(spoken(choice), 14)) for choice in self.field.choices]
        low, high = self._bounds()
        if not self.field.log:
            inner = Linear(low, high, self.start, self.end, num_ticks=4).ticks()
            return [(value, text) for value, text in inner]
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        steps = (1, 3) if last - first < 3 else (1,)
        values = [m * 10.0**k for k in range(first, last + 1) for m in steps]
        return [(v, significant(v, 2)) for v in values if low * 0.999 <= v <= high * 1.001]


def spoken(choice: object) -> str:
    """A value as people read it: `[64, 32]` becomes `64, 32`, and a number gets few digits."""
    if not isinstance(choice, str):
        assert isinstance(choice, int | float)
        return str(choice) if isinstance(choice, int) else significant(choice, 3)
    value = json.loads(choice)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def history_chart(title: str, record: StudyRecord) -> Markup:
    """Each trial's best AUC (or R2) in the order of the trials, and the best one so far."""
    shown = [t for t in record.trials if is_shown(t.quality)]
    values = [t.quality for t in shown if t.quality is not None]
    frame = _frame([t.number for t in shown] or [0], _upper_part(values))
    dots = [_trial_dot(t, frame.x(t.number), frame.y(t.quality or 0)) for t in shown]
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in _best_so_far(shown))
    best = tag("polyline", points=path, class_="line s2") if path else Markup("")
    return picture(
        title,
        f"Best validation {record.quality_name} of {len(shown)} trials in their order, and the "
        "best so far.",
        WIDTH,
        HEIGHT,
        frame.grid("trial", f"validation {record.quality_name}"),
        best,
        *dots,
        _legend(record.trials, "best so far"),
    )


def curves_chart(title: str, record: StudyRecord) -> Markup:
    """Validation AUC or R2 by epoch of every trial; a dotted line ends where it was pruned."""
    shown = [t for t in record.trials if t.epochs][-MOST_LINES:]
    values = [e.quality for t in shown for e in t.epochs if is_shown(e.quality)]
    frame = _frame([1, record.max_epochs], _upper_part(values))
    order = sorted(shown, key=lambda t: t.number == record.best)  # the best one on top
    return picture(
        title,
        f"Validation {record.quality_name} by epoch of {len(shown)} trials.",
        WIDTH,
        HEIGHT,
        frame.grid("epoch", f"validation {record.quality_name}"),
        *[_curve(t, frame, t.number == record.best) for t in order],
        _curve_legend(),
    )


def importance_chart(title: str, record: StudyRecord) -> Markup:
    """How much of the quality's variance over the space each field explains."""
    rows = sorted(record.importance.items(), key=lambda item: -item[1])
    names = max([text_width(shortened(name, LONGEST_NAME)) for name, _ in rows] + [60.0]) + 18
    top, right = 14.0, WIDTH - 60
    scale = Linear(0.0, 1.0, names, right)
    bottom = top + ROW * max(len(rows), 1)
    parts: list[Markup] = []
    for at, text in scale.ticks():
        parts.append(line(scale(at), top, scale(at), bottom, "grid"))
        parts.append(label(text, scale(at), bottom + 17, anchor="middle", kind="tick"))
    for row, (name, share) in enumerate(rows):
        middle = top + ROW * (row + 0.5)
        bar = {"x": names, "y": middle - 8, "height": 16.0, "class_": "bar s1"}
        tip = tag("title", f"{name}: {percent(share)}")
        parts += [
            label(shortened(name, LONGEST_NAME), names - 10, middle + 4, anchor="end"),
            tag("rect", tip, width=max(scale(share) - names, 1.0), **bar),
            label(percent(share), scale(share) + 8, middle + 4, kind="faint"),
        ]
    title_at = label(
        "share of the variance explained (fANOVA)",
        (names + right) / 2,
        bottom + 36,
        anchor="middle",
        kind="axis-title",
    )
    return picture(
        title, f"Importance of {len(rows)} fields.", WIDTH, bottom + 46, *parts, title_at
    )


def slice_charts(record: StudyRecord) -> Iterator[tuple[str, Markup]]:
    """For each field, the quality of every trial by the field's value."""
    shown = [t for t in record.trials if is_shown(t.quality)]
    low, high = _upper_part([t.quality for t in shown if t.quality is not None])
    for field in record.fields:
        width, height = 344.0, 250.0
        scale = FieldScale(field, LEFT + 6, width - RIGHT - 6)
        bottom = height - BOTTOM
        y = Linear(low, high, bottom, 40.0, num_ticks=4)
        frame = Frame(x=scale, y=y, left=LEFT, top=40.0, right=width - RIGHT, bottom=bottom)
        drawing = picture(
            f"{record.quality_name} by {field.name}",
            f"Best validation {record.quality_name} of {len(shown)} trials by {field.name}.",
            width,
            height,
            frame.grid(
                field.name + (" (logarithmic)" if field.log else ""),
                f"validation {record.quality_name}",
            ),
            *_choice_marks(scale, bottom),
            *[_trial_dot(t, scale(t.point[field.name]), y(t.quality or 0)) for t in shown],
            kind="square",
        )
        yield field.name, drawing


def parallel_chart(title: str, record: StudyRecord) -> Markup:
    """One upright axis a field and one for the quality; each complete or pruned trial is a line."""
    shown = [t for t in record.trials if is_shown(t.quality)][-MOST_LINES:]
    low, high = _upper_part([t.quality for t in shown if t.quality is not None])
    top, bottom, width = 46.0, 290.0, max(620.0, 150.0 * (len(record.fields) + 1))
    step = (width - 150) / max(len(record.fields), 1)
    places = [70 + step * k for k in range(len(record.fields) + 1)]
    scales = [FieldScale(field, bottom, top) for field in record.fields]
    auc: Scale = Linear(low, high, bottom, top)
    order = sorted(shown, key=lambda t: (t.number == record.best, t.state == "complete"))
    lines = []
    for trial in order:
        ys = [scale(trial.point[scale.field.name]) for scale in scales] + [auc(trial.quality or 0)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(places, ys, strict=True))
        lines.append(_trial_line(trial, path, trial.number == record.best))
    axes = [
        _upright(scale.field.name, place, [(scale(v), text) for v, text in scale.marks()])
        for scale, place in zip(scales, places, strict=False)
    ]
    axes.append(
        _upright(record.quality_name, places[-1], [(auc(v), text) for v, text in auc.ticks()])
    )
    return picture(
        title,
        f"{len(shown)} trials over {len(record.fields)} fields and the validation "
        f"{record.quality_name}.",
        width,
        310.0,
        *lines,
        *axes,
        kind="wide",
    )


def _upright(name: str, at: float, ticks: Sequence[tuple[float, str]]) -> Markup:
    parts = [
        line(at, 46.0, at, 290.0, "axis"),
        label(shortened(name, 20), at, 24, anchor="middle", kind="strong"),
    ]
    for y, text in ticks:
        parts.append(line(at - 4, y, at, y, "axis"))
        # A rim in the card's colour keeps the words legible where lines cross them.
        rim = {"stroke": "var(--card)", "stroke_width": 4, "paint_order": "stroke"}
        words = {"x": at - 8, "y": y + 4, "text_anchor": "end", "class_": "tick"}
        parts.append(tag("text", text, **rim, **words))
    return tag("g", *parts)


def _choice_marks(scale: FieldScale, bottom: float) -> Iterator[Markup]:
    for value, text in scale.marks() if scale.field.choices else ():
        yield label(text, scale(value), bottom + 17, anchor="middle", kind="tick")


def _frame(xs: Sequence[float], bounds: tuple[float, float]) -> Frame:
    low_x, high_x = domain(xs, margin=0.03)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    return Frame(
        x=Linear(low_x, high_x, LEFT, right, num_ticks=10, whole_numbers=True),
        y=Linear(*bounds, bottom, TOP),
        left=LEFT,
        top=TOP,
        right=right,
        bottom=bottom,
    )


def _upper_part(values: Sequence[float]) -> tuple[float, float]:
    """The range in which trials differ that matter; what lies far below is drawn at its edge."""
    if not values:
        return domain(values)
    high = max(values)
    low = max(min(values), high - 10 * CURVE_TOLERANCE)
    return domain([low, high], margin=0.08)


def _best_so_far(trials: Sequence[TrialRecord]) -> Iterator[tuple[float, float]]:
    best = -math.inf
    for trial in trials:
        if trial.state == "complete" and trial.quality is not None:
            if trial.quality > best > -math.inf:
                yield trial.number, best
            best = max(best, trial.quality)
            yield trial.number, best
    if trials and best > -math.inf:
        yield trials[-1].number, best


def _tip(trial: TrialRecord) -> Markup:
    point = ", ".join(f"{name} {spoken(value)}" for name, value in trial.point.items())
    return tag(
        "title",
        f"trial {trial.number}, {trial.state}, {trial.quality_name} {decimal(trial.quality, 4)}: "
        f"{point}",
    )


def _trial_dot(trial: TrialRecord, x: float, y: float) -> Markup:
    """Complete trials are discs, pruned ones triangles, failed ones crosses."""
    tip, kind = _tip(trial), KINDS[trial.state]
    if trial.state == "complete":
        return tag("circle", tip, cx=x, cy=y, r=4.5, class_=kind)
    if trial.state == "pruned":
        points = f"{x - 4.5:.1f},{y - 3.5:.1f} {x + 4.5:.1f},{y - 3.5:.1f} {x:.1f},{y + 4.5:.1f}"
        return tag("polygon", tip, points=points, class_=kind)
    one = line(x - 4, y - 4, x + 4, y + 4, "whisker s2", tip)
    return tag("g", one, line(x - 4, y + 4, x + 4, y - 4, "whisker s2"))


def _curve(trial: TrialRecord, frame: Frame, is_best: bool) -> Markup:
    points = [
        (frame.x(e.epoch + 1), frame.y(e.quality)) for e in trial.epochs if is_shown(e.quality)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    drawn = _trial_line(trial, path, is_best)
    if trial.state != "pruned" or not points:
        return drawn
    return tag("g", drawn, _trial_dot(trial, *points[-1]))


def _trial_line(trial: TrialRecord, path: str, is_best: bool) -> Markup:
    kind, opacity = ("line s2", 1.0) if is_best else ("line s1", 0.45)
    if trial.state != "complete":
        kind, opacity = "line s3", 0.55
    return tag("polyline", _tip(trial), points=path, class_=kind, opacity=opacity)


def _legend(trials: Sequence[TrialRecord], line_text: str) -> Markup:
    parts: list[Markup] = []
    at = 8.0
    for state in KINDS:
        some = next((t for t in trials if t.state == state), None)
        if some is None:
            continue
        parts += [_trial_dot(some, at, 16), label(state, at + 10, 20)]
        at += 28 + text_width(state)
    parts += [line(at, 16, at + 20, 16, "line s2"), label(line_text, at + 26, 20)]
    return tag("g", *parts)


def _curve_legend() -> Markup:
    parts: list[Markup] = []
    at = 4.0
    for text, kind in (("best", "line s2"), ("complete", "line s1"), ("pruned", "line s3")):
        parts += [line(at, 16, at + 22, 16, kind), label(text, at + 28, 20)]
        at += 46 + text_width(text)
    return tag("g", *parts)
