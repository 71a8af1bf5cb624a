"""Charts of named rows: estimates with intervals, drift effects, latencies. One row a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tasks.reporting.axes import Linear, Logarithmic, Scale, domain, powers_around, round_up
from tasks.reporting.quantities import decimal, factor, is_shown, milliseconds, shortened
from tasks.reporting.svg import label, line, picture, tag, text_width

ROW = 24.0
LONGEST_NAME = 24
NAME_GAP = 12.0
FOOT = 46.0


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; `note` stands at the right, `tip` is shown on hover."""

    name: str
    value: float
    low: float
    high: float
    note: str = ""
    tip: str = ""
    style: int = 1


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

    Notes stand at the right, or below the names where they are long.
    """
    top, step, width = 34.0, ROW + 16 * note_below, 520.0
    notes = max([text_width(r.note) for r in rows] + [0.0])
    names = _name_width([r.name for r in rows])
    left = max(names, notes + NAME_GAP + 4) if note_below else names
    right = width - (36 if note_below else 14 + notes)
    bottom = top + step * max(len(rows), 1)
    values = [v for r in rows for v in (r.value, r.low, r.high)]
    bounds = domain([*values, *([] if reference is None else [reference])])
    scale = Linear(*bounds, left, right, num_ticks=max(2, int((right - left) // 60)))
    return picture(
        title,
        f"{len(rows)} rows, each a value with its 95 % interval. {reference_text}".strip(),
        width,
        bottom + FOOT,
        _columns(scale, top, bottom, x_title),
        _reference(scale, reference, reference_text, top, bottom),
        *[
            _estimate(r, scale, top + step * (i + 0.5), None if note_below else width - 4)
            for i, r in enumerate(rows)
        ],
    )


def _estimate(row: Estimate, scale: Linear, middle: float, note_end: float | None) -> Markup:
    """One row; its note ends at `note_end`, or stands below the name where that is None."""
    tip = row.tip or f"{row.name}: {row.note}"
    lift = 8 if note_end is None else 0
    note_x = scale.start - NAME_GAP if note_end is None else note_end
    parts = [
        _name(row.name, scale, middle - lift),
        label(row.note, note_x, middle + 4 + lift, anchor="end", kind="faint"),
    ]
    if is_shown(row.low) and is_shown(row.high):
        parts.append(line(scale(row.low), middle, scale(row.high), middle, f"whisker s{row.style}"))
    if is_shown(row.value):
        dot = {"cx": scale(row.value), "cy": middle, "r": 4.5, "class_": f"dot s{row.style}"}
        parts.append(tag("circle", tag("title", tip), **dot))
    return tag("g", *parts)


def _reference(
    scale: Scale, value: float | None, text: str, top: float, bottom: float
) -> Markup | str:
    if value is None or not is_shown(value):
        return ""
    at = scale(value)
    return tag(
        "g",
        line(at, top - 4, at, bottom, "baseline"),
        label(text, at, top - 10, anchor="middle", kind="faint"),
    )


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
    title: str,
    rows: Sequence[Effect],
    headings: Sequence[str],
    *,
    threshold: float | None = None,
    width: float = 690.0,
) -> Markup:
    """Bars from zero: solid to the lower bound, pale to the estimate; columns at the right."""
    top, column = 46.0, 84.0
    left = _name_width([r.name for r in rows]) + 14
    right = width - column * len(headings) - 8
    bottom = top + ROW * max(len(rows), 1)
    largest = max([r.size for r in rows if is_shown(r.size)] + [threshold or 0.0, 0.01])
    scale = Linear(0.0, round_up(largest), left, right)
    places = [right + column * (i + 1) for i in range(len(headings))]
    heads = [
        label(h, x, top - 12, anchor="end", kind="faint")
        for h, x in zip(headings, places, strict=True)
    ]
    text = "" if threshold is None else f"threshold {decimal(threshold, 2)}"
    return picture(
        title,
        f"{len(rows)} features by size of change; {sum(r.drifted for r in rows)} have drifted.",
        width,
        bottom + FOOT,
        _columns(scale, top, bottom, "effect size, 0 to 1 (solid: at least, pale: estimate)"),
        *heads,
        *[_effect(r, scale, top + ROW * (i + 0.5), places) for i, r in enumerate(rows)],
        _reference(scale, threshold, text, top, bottom),
        kind="wide",
    )


def _effect(row: Effect, scale: Linear, middle: float, places: Sequence[float]) -> Markup:
    kind, spare = ("bar s2", 22) if row.drifted else ("bar quiet", 0)
    parts = [_name(row.name, scale, middle, tip=row.tip, strong=row.drifted, spare=spare)]
    if row.drifted:  # told without colour too
        parts.append(label("▲", scale.start - 22, middle + 4, anchor="middle", kind="mark-text"))
    for value, pale in ((row.size, " soft"), (row.low, "")):
        if is_shown(value) and value > 0:
            box = {"x": scale.start, "y": middle - 7, "height": 14.0, "class_": kind + pale}
            parts.append(
                tag("rect", tag("title", row.tip), width=scale(value) - scale.start, **box)
            )
    parts += [
        label(text, x, middle + 4, anchor="end")
        for text, x in zip(row.columns, places, strict=True)
    ]
    return tag("g", *parts)


@dataclass(frozen=True)
class Latency:
    """Median latency of one variant at one batch size; `ratio` is against PyTorch eager."""

    variant: str
    batch_rows: int
    p50_ms: float
    p95_ms: float
    ratio: float
    kept: bool


def latency_chart(title: str, rows: Sequence[Latency], *, width: float = 760.0) -> Markup:
    """Bars on a logarithmic axis, grouped by batch size; dropped variants are outlined."""
    groups = {
        b: [r for r in rows if r.batch_rows == b] for b in sorted({r.batch_rows for r in rows})
    }
    top, head = 20.0, 28.0
    bottom = top + sum(head + ROW * len(group) for group in groups.values())
    left = _name_width([r.variant for r in rows])
    scale = Logarithmic(*powers_around(r.p50_ms for r in rows), left, width - 176)
    parts: list[Markup] = []
    at = top
    for batch_rows, group in groups.items():
        unit = "row" if batch_rows == 1 else "rows"
        parts.append(label(f"batch of {batch_rows:,} {unit}", left, at + 18, kind="strong"))
        at += head
        for row in sorted(group, key=lambda r: r.p50_ms):
            parts.append(_latency(row, scale, at + ROW / 2))
            at += ROW
    return picture(
        title,
        f"{len({r.variant for r in rows})} variants at {len(groups)} batch sizes, medians.",
        width,
        bottom + FOOT,
        _columns(scale, top, bottom, "median latency in ms, logarithmic (shorter is faster)"),
        *parts,
        kind="wide",
    )


def _latency(row: Latency, scale: Logarithmic, middle: float) -> Markup:
    parts = [_name(row.variant, scale, middle)]
    if not is_shown(row.p50_ms) or row.p50_ms <= 0:
        return tag("g", *parts, label("not measured", scale.start + 8, middle + 4, kind="faint"))
    end = scale(row.p50_ms)
    fate = "kept" if row.kept else "dropped"
    tip = (
        f"{row.variant} ({fate}), {row.batch_rows:,} rows: median {milliseconds(row.p50_ms)}, "
        f"95 % of calls within {milliseconds(row.p95_ms)}, {factor(row.ratio)} of PyTorch eager"
    )
    box = {"x": scale.start, "y": middle - 7, "height": 14.0, "rx": 2.0}
    kind = "bar s1" if row.kept else "bar dropped"
    parts.append(
        tag("rect", tag("title", tip), width=max(1.0, end - scale.start), class_=kind, **box)
    )
    words = f"{milliseconds(row.p50_ms)} · {factor(row.ratio)} eager"
    parts.append(label(words, end + 8, middle + 4, kind="faint"))
    return tag("g", *parts)


def _columns(scale: Scale, top: float, bottom: float, x_title: str) -> Markup:
    ticks = scale.ticks()
    parts = [line(scale(v), top, scale(v), bottom, "grid") for v, _ in ticks]
    parts += [label(t, scale(v), bottom + 17, anchor="middle", kind="tick") for v, t in ticks]
    ends = [scale(v) for v, _ in ticks] or [0.0]
    middle = (min(ends) + max(ends)) / 2
    return tag("g", *parts, label(x_title, middle, bottom + 36, anchor="middle", kind="axis-title"))


def _name(
    name: str,
    scale: Linear | Logarithmic,
    middle: float,
    *,
    tip: str = "",
    strong: bool = False,
    spare: float = 0,
) -> Markup:
    """The row's name, right-aligned before the axis; the whole name shows on hover."""
    return label(
        shortened(name, LONGEST_NAME),
        scale.start - NAME_GAP - spare,
        middle + 4,
        anchor="end",
        kind="strong" if strong else "label",
        tip=tip or name,
    )


def _name_width(names: Sequence[str]) -> float:
    longest = max([len(shortened(n, LONGEST_NAME)) for n in names] + [4])
    return text_width("n" * longest) + NAME_GAP + 4
