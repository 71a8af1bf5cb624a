"""The page of a search: what was tried, what came out, and what the best trial is."""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.lines import Line2D

from tasks.contracts.training import SearchedField, StudyRecord, TrialRecord
from tasks.kernel.files import write_atomically
from tasks.reporting import drawing as draw
from tasks.reporting.gallery import Drawings
from tasks.reporting.page import page_environment
from tasks.reporting.quantities import decimal, is_shown, shortened, significant

PAGE, FACTS = "search.html", "search.json"
MOST_ROWS = 500
REACH = 0.2
"""How far below the best the axes of qualities reach; what is lower is drawn at their edge."""
MARKERS: dict[str, dict[str, Any]] = {
    "complete": {"marker": "o", "color": draw.WATER, "ms": 8},
    "pruned": {"marker": "v", "color": draw.VIOLET, "ms": 8},
    "failed": {"marker": "x", "color": draw.SAND, "ms": 7, "mec": draw.SAND, "mew": 2},
}
"""A state has a shape too, not a colour alone."""


def render_search_page(record: StudyRecord, pictures: Drawings) -> str:
    """The whole HTML page, self-contained: no script and no address that a browser would load."""
    states: list[str] = [trial.state for trial in record.trials]
    ranked = sorted(
        record.trials, key=lambda t: (t.state != "complete", -(t.quality or 0), t.number)
    )
    template = page_environment().get_template("search.html.j2")
    return template.render(
        record=record,
        best=next((t for t in record.trials if t.number == record.best), None),
        counts={state: states.count(state) for state in MARKERS},
        ranked=ranked[:MOST_ROWS],
        pictures=pictures,
        readable=readable,
    )


def write_search_page(record: StudyRecord, folder: Path, pictures: Drawings) -> Path:
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
    """The history of a search, and its quality by each field, by key."""
    by_field = {field.name: field_chart(record, field) for field in record.fields}
    return {"history": history_chart(record), **by_field}


def readable(choice: object) -> str:
    """A value as people read it: `[64, 32]` becomes `64, 32`, and a number gets few digits."""
    if isinstance(choice, str):
        value = json.loads(choice)
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return significant(choice, 3) if isinstance(choice, float) else str(choice)


def history_chart(record: StudyRecord) -> Markup:
    """Each trial's best AUC (or R2) in the order of the trials, and the best one so far."""
    shown, (low, high) = _judged(record)
    name = f"validation {record.quality_name}"
    with draw.canvas(860, 300, (58, 16, 66, 48)) as drawing:
        complete = [t for t in shown if t.state == "complete"]
        best = list(accumulate((t.quality or 0 for t in complete), max))
        numbers = [t.number for t in complete]
        if complete:
            numbers, best = [*numbers, shown[-1].number], [*best, best[-1]]
        drawing.axes.step(numbers, np.clip(best, low, high), where="post", **draw.LINES[1])
        for trial in shown:
            _dot(drawing, trial, trial.number, low)
        drawing.axes.set(
            xlim=draw.limits(*(t.number for t in shown), margin=0.03), ylim=(low, high)
        )
        drawing.titles("trial", name)
        draw.whole_numbers(drawing.axes.xaxis)
        states = [state for state in MARKERS if any(t.state == state for t in shown)]
        keys = [Line2D([], [], linestyle="", **MARKERS[state]) for state in states]
        drawing.legend([*keys, Line2D([], [], **draw.LINES[1])], [*states, "best so far"])
        words = f"Best {name} of {len(shown)} trials in their order, and the best so far."
        return drawing.svg("Optimisation history", words, "wide")


def field_chart(record: StudyRecord, field: SearchedField) -> Markup:
    """The quality of every trial by one field's value."""
    shown, (low, high) = _judged(record)
    name = f"validation {record.quality_name}"
    with draw.canvas(344, 250, (58, 16, 40, 48)) as drawing:
        axes = drawing.axes
        for trial in shown:
            value = trial.point[field.name]
            place = field.choices.index(str(value)) if field.choices else float(value)
            _dot(drawing, trial, place, low)
        axes.set_ylim(low, high)
        if field.choices:
            axes.set_xlim(-0.5, len(field.choices) - 0.5)
        else:
            axes.set_xscale("log" if field.log else "linear")
            axes.set_xlim(field.low, field.high)
        drawing.titles(field.name + (" (logarithmic)" if field.log else ""), name)
        if field.choices:
            words = [shortened(readable(choice), 14) for choice in field.choices]
            axes.set_xticks(range(len(words)), words)
        told = f"Best {name} of {len(shown)} trials by {field.name}."
        return drawing.svg(f"{record.quality_name} by {field.name}", told, "square")


def _judged(record: StudyRecord) -> tuple[list[TrialRecord], tuple[float, float]]:
    """Trials whose quality is known, and the range of qualities where trials differ that matter."""
    shown = [trial for trial in record.trials if is_shown(trial.quality)]
    known = [trial.quality or 0.0 for trial in shown]
    best = max(known, default=0.0)
    return shown, draw.limits(*(max(value, best - REACH) for value in known), margin=0.08)


def _dot(drawing: draw.Canvas, trial: TrialRecord, x: float, low: float) -> None:
    y = max(trial.quality or 0, low)
    (dot,) = drawing.axes.plot([x], [y], linestyle="", clip_on=False, **MARKERS[trial.state])
    point = ", ".join(f"{name} {readable(value)}" for name, value in trial.point.items())
    quality = f"{trial.quality_name} {decimal(trial.quality, 4)}"
    drawing.tip(dot, f"trial {trial.number}, {trial.state}, {quality}: {point}")
