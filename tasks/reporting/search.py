"""The page of a search: what was tried, what came out, and what the best trial is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from tasks.contracts.training import SearchedField, StudyRecord, TrialRecord
from tasks.kernel.files import write_atomically
from tasks.reporting.drawing import (
    CARD,
    INK,
    LINES,
    SAND,
    SOFT,
    STONE,
    VIOLET,
    WATER,
    Canvas,
    canvas,
    limits,
    name_width,
    whole_numbers,
)
from tasks.reporting.page import Drawings, page_environment
from tasks.reporting.quantities import decimal, is_shown, percent, shortened, significant

PAGE, FACTS = "search.html", "search.json"
MOST_ROWS = 500
MOST_LINES = 200
MARGINS = (58, 16, 66, 48)
REACH = 0.2
"""How far below the best the axes of qualities reach; what is lower is drawn at their edge."""
MARKERS: dict[str, dict[str, Any]] = {
    "complete": {"marker": "o", "color": WATER, "ms": 8},
    "pruned": {"marker": "v", "color": VIOLET, "ms": 8},
    "failed": {"marker": "x", "color": SAND, "ms": 7, "mec": SAND, "mew": 2},
}
"""A state has a shape too, not a colour alone."""


def render_search_page(record: StudyRecord, pictures: Drawings | None = None) -> str:
    """The whole HTML page, self-contained: no script and no address that a browser would load."""
    states: list[str] = [trial.state for trial in record.trials]
    template = page_environment().get_template("search.html.j2")
    return template.render(
        record=record,
        best=next((t for t in record.trials if t.number == record.best), None),
        counts={state: states.count(state) for state in MARKERS},
        num_repeats=sum(trial.repeats is not None for trial in record.trials),
        seconds=sum(trial.seconds for trial in record.trials),
        ranked=sorted(
            record.trials, key=lambda t: (t.state != "complete", -(t.quality or 0), t.number)
        )[:MOST_ROWS],
        pictures=pictures or gallery(record),
        slices=[(field.name, slice_chart(record, field)) for field in record.fields],
        readable=readable,
    )


def write_search_page(record: StudyRecord, folder: Path, pictures: Drawings | None = None) -> Path:
    """Write `<folder>/<study>/search.html` and, before it, the same facts as `search.json`.

    The same record gives the same files, so it can be repeated.

    Raises:
        StorageError: the disk refused a write.
    """
    target = folder / record.study
    write_atomically(target / FACTS, record.model_dump_json(indent=1) + "\n")
    write_atomically(target / PAGE, render_search_page(record, pictures))
    return target / PAGE


def gallery(record: StudyRecord) -> dict[str, Markup]:
    """The pictures that the Prefect UI shows too, by key."""
    drawn = {
        "history": history_chart(record),
        "curves": curves_chart(record),
        "parallel": parallel_chart(record),
    }
    return {**drawn, "importance": importance_chart(record)} if record.importance else drawn


def readable(choice: object) -> str:
    """A value as people read it: `[64, 32]` becomes `64, 32`, and a number gets few digits."""
    if isinstance(choice, str):
        value = json.loads(choice)
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return significant(choice, 3) if isinstance(choice, float) else str(choice)


def history_chart(record: StudyRecord) -> Markup:
    """Each trial's best AUC (or R2) in the order of the trials, and the best one so far."""
    shown = _judged(record)
    complete = [t for t in shown if t.state == "complete"]
    name = f"validation {record.quality_name}"
    with canvas(620, 320, MARGINS) as drawing:
        low, high = _qualities(shown)
        best = list(accumulate((t.quality or 0 for t in complete), max))
        numbers = [t.number for t in complete]
        if shown and complete:
            numbers, best = [*numbers, shown[-1].number], [*best, best[-1]]
        drawing.axes.step(numbers, np.clip(best, low, high), where="post", **LINES[1])
        for trial in shown:
            _dot(drawing, drawing.axes, trial, trial.number, max(trial.quality or 0, low))
        drawing.axes.set(xlim=limits(*(t.number for t in shown), margin=0.03), ylim=(low, high))
        drawing.titles("trial", name)
        whole_numbers(drawing.axes.xaxis)
        states = [state for state in MARKERS if any(t.state == state for t in record.trials)]
        keys: list[Artist] = [Line2D([], [], linestyle="", **MARKERS[s]) for s in states]
        drawing.legend([*keys, Line2D([], [], **LINES[1])], [*states, "best so far"])
        words = f"Best {name} of {len(shown)} trials in their order, and the best so far."
        return drawing.svg("Optimisation history", words)


def curves_chart(record: StudyRecord) -> Markup:
    """Validation AUC or R2 by epoch of every trial; a dotted line ends where it was pruned."""
    shown = [t for t in record.trials if t.epochs][-MOST_LINES:]
    name = f"validation {record.quality_name}"
    with canvas(620, 320, MARGINS) as drawing:
        low, high = _range([e.quality for t in shown for e in t.epochs if is_shown(e.quality)])
        for trial in sorted(shown, key=lambda t: t.number == record.best):  # the best one on top
            points = [
                (e.epoch + 1, max(e.quality, low)) for e in trial.epochs if is_shown(e.quality)
            ]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            _line(drawing, drawing.axes, trial, xs, ys, record.best)
            if trial.state == "pruned" and points:
                _dot(drawing, drawing.axes, trial, *points[-1])
        drawing.axes.set(xlim=limits(1, record.max_epochs, margin=0.03), ylim=(low, high))
        drawing.titles("epoch", name)
        whole_numbers(drawing.axes.xaxis)
        keys = [Line2D([], [], **LINES[n]) for n in (1, 0, 2)]
        drawing.legend(keys, ["best", "complete", "pruned"])
        return drawing.svg("Learning curves", f"{name} by epoch of {len(shown)} trials.")


def importance_chart(record: StudyRecord) -> Markup:
    """How much of the quality's variance over the space each field explains."""
    rows = sorted(record.importance.items(), key=lambda item: -item[1])
    names = [name for name, _ in rows]
    with canvas(620, 60 + 26 * len(rows), (name_width(names), 60, 14, 46)) as drawing:
        drawing.rows(names)
        for n, (name, share) in enumerate(rows):
            (bar,) = drawing.axes.barh([n], [share], 0.62, color=WATER)
            drawing.tip(bar, f"{name}: {percent(share)}")
            drawing.note(percent(share), (share, n), (8, 0), color=SOFT)
        drawing.axes.set_xlim(0, 1)
        drawing.titles("share of the variance explained (fANOVA)")
        return drawing.svg("Importance of the fields", f"Importance of {len(rows)} fields.")


def slice_chart(record: StudyRecord, field: SearchedField) -> Markup:
    """The quality of every trial by one field's value."""
    shown = _judged(record)
    name = f"validation {record.quality_name}"
    with canvas(344, 250, (58, 16, 40, 48)) as drawing:
        axes = drawing.axes
        low, high = _qualities(shown)
        for trial in shown:
            value = _place(field, trial.point[field.name])
            _dot(drawing, axes, trial, value, max(trial.quality or 0, low))
        axes.set(xlim=(-0.04, 1.04), ylim=(low, high))
        drawing.titles(field.name + (" (logarithmic)" if field.log else ""), name)
        places = _ticks(field)
        axes.set_xticks([place for place, _ in places], [text for _, text in places])
        words = f"Best {name} of {len(shown)} trials by {field.name}."
        return drawing.svg(f"{record.quality_name} by {field.name}", words, "square")


def parallel_chart(record: StudyRecord) -> Markup:
    """One upright axis a field and one for the quality; each complete or pruned trial is a line."""
    shown = _judged(record)[-MOST_LINES:]
    low, high = _qualities(shown)
    columns = [(f.name, _ticks(f)) for f in record.fields]
    steps = np.linspace(0, 1, 6)[1:-1]
    qualities = [(float(s), decimal(low + s * (high - low), 3)) for s in steps]
    columns.append((record.quality_name, qualities))
    width = max(620.0, 150.0 * len(columns))
    with canvas(width, 310, (70, 80, 46, 20)) as drawing:
        axes = drawing.axes
        for trial in sorted(shown, key=lambda t: (t.number == record.best, t.state == "complete")):
            heights = [_place(f, trial.point[f.name]) for f in record.fields]
            heights.append(max((trial.quality or 0) - low, 0) / (high - low))
            _line(drawing, axes, trial, range(len(columns)), heights, record.best)
        axes.set(xlim=(0, max(len(columns) - 1, 1)), ylim=(0, 1), xticks=[], yticks=[])
        axes.spines["bottom"].set_visible(False)
        for n, (name, ticks) in enumerate(columns):
            axes.axvline(n, color=STONE, linewidth=1, clip_on=False)
            title = shortened(name, 20)
            drawing.note(title, (n, 1), (0, 18), ha="center", color=INK, fontweight="bold")
            for place, text in ticks:
                rim = {"facecolor": CARD, "edgecolor": "none", "pad": 1.5}
                drawing.note(text, (n, place), (-8, 0), ha="right", color=SOFT, bbox=rim)
        return drawing.svg(
            "Parallel coordinates",
            f"{len(shown)} trials over {len(record.fields)} fields and the validation "
            f"{record.quality_name}.",
            "wide",
        )


def _judged(record: StudyRecord) -> list[TrialRecord]:
    return [trial for trial in record.trials if is_shown(trial.quality)]


def _qualities(trials: Sequence[TrialRecord]) -> tuple[float, float]:
    return _range([t.quality for t in trials if t.quality is not None])


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Where trials differ that matter."""
    if not values:
        return limits()
    return limits(max(min(values), max(values) - REACH), max(values), margin=0.08)


def _place(field: SearchedField, value: float | int | str) -> float:
    """Where a value is between the lowest (0) and the highest (1) of its field."""
    if field.choices:
        return (field.choices.index(str(value)) + 0.5) / len(field.choices)
    low, high, at = _scaled(field, field.low, field.high, value)
    return float(np.clip((at - low) / (high - low), 0, 1))


def _scaled(field: SearchedField, *values: Any) -> Any:
    numbers = np.array(values, dtype=np.float64)
    return np.log10(numbers) if field.log else numbers


def _ticks(field: SearchedField) -> list[tuple[float, str]]:
    """Places worth a grid line, and how they are written: every choice, or round numbers."""
    if field.choices:
        return [(_place(field, c), shortened(readable(c), 14)) for c in field.choices]
    low, high = _scaled(field, field.low, field.high)
    steps = (0.0, np.log10(3)) if field.log and high - low < 3 else (0.0,)
    if field.log:
        numbers = [
            10 ** (k + s) for k in range(int(np.floor(low)), int(np.ceil(high)) + 1) for s in steps
        ]
    else:
        numbers = list(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high))
    spare = 1e-6 * (high - low)
    return [
        (_place(field, n), significant(n, 2))
        for n in numbers
        if low - spare <= _scaled(field, n)[0] <= high + spare
    ]


def _tip(trial: TrialRecord) -> str:
    point = ", ".join(f"{name} {readable(value)}" for name, value in trial.point.items())
    quality = f"{trial.quality_name} {decimal(trial.quality, 4)}"
    return f"trial {trial.number}, {trial.state}, {quality}: {point}"


def _dot(drawing: Canvas, axes: Axes, trial: TrialRecord, x: float, y: float) -> None:
    (dot,) = axes.plot([x], [y], linestyle="", clip_on=False, **MARKERS[trial.state])
    drawing.tip(dot, _tip(trial))


def _line(
    drawing: Canvas,
    axes: Axes,
    trial: TrialRecord,
    xs: Sequence[float],
    ys: Sequence[float],
    best: int | None,
) -> None:
    if trial.state == "complete":
        style = {**LINES[1]} if trial.number == best else {**LINES[0], "alpha": 0.45}
    else:
        style = {**LINES[2], "alpha": 0.55}
    (line,) = axes.plot(xs, ys, **style)
    drawing.tip(line, _tip(trial))
