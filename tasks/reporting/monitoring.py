"""Small multiples of features over time: a band of values, nulls and age, one small chart each."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from tasks.contracts.data import FeatureMonitoring, MonitoredFeature, MonitoredPeriod, MonitoredView
from tasks.reporting.axes import Linear, domain, round_up
from tasks.reporting.quantities import decimal, is_shown, percent, shortened, significant
from tasks.reporting.svg import label, line, picture, tag

COLUMNS = 3
CELL_WIDTH, CELL_HEIGHT = 172.0, 116.0
GAP, TOP = 10.0, 46.0
FOOT = 18.0
"""Room below a chart for the label of its lower edge."""
LONGEST = 25
Points = list[tuple[float, float]]


def feature_multiples(seen: FeatureMonitoring) -> Markup:
    """Median of each feature as a line, 5th to 95th percentile as a band around it."""
    cells = [_feature_cell(feature, *_corner(n)) for n, feature in enumerate(seen.features)]
    told = "; ".join(
        f"{f.view} {f.feature}: PSI {decimal(f.psi, 2) if f.psi is not None else 'not measured'}"
        for f in seen.features
    )
    return _sheet("Features over time", told, cells, seen)


def view_multiples(seen: FeatureMonitoring) -> Markup:
    """Share of nulls of each view as an area, age of its newest row as a dashed line."""
    cells = [_view_cell(view, *_corner(n)) for n, view in enumerate(seen.views)]
    told = "; ".join(f"{v.view}: {percent(v.null_rate)} nulls" for v in seen.views)
    return _sheet("Views over time", told, cells, seen)


def _sheet(title: str, told: str, cells: Sequence[Markup], seen: FeatureMonitoring) -> Markup:
    rows = -(-len(cells) // COLUMNS)
    width = COLUMNS * (CELL_WIDTH + GAP)
    bottom = rows * (CELL_HEIGHT + FOOT)
    return picture(
        title,
        told,
        width,
        bottom + 22,
        *cells,
        label(f"{seen.window.start:%Y-%m-%d}", 0, bottom + 15, kind="tick"),
        label(f"{seen.window.end:%Y-%m-%d}", width - GAP, bottom + 15, anchor="end", kind="tick"),
    )


def _corner(number: int) -> tuple[float, float]:
    return (number % COLUMNS) * (CELL_WIDTH + GAP), (number // COLUMNS) * (CELL_HEIGHT + FOOT)


def _feature_cell(feature: MonitoredFeature, x: float, y: float) -> Markup:
    known = [(n, p) for n, p in enumerate(feature.periods) if _has_band(p)]
    values = [v for _, p in known for v in (p.low, p.high) if v is not None]
    low, high = domain(values, margin=0.0)  # what stands at the edges was seen: no rain below zero
    across, up = _scales(x, y, len(feature.periods), low, high)
    upper: Points = [(across(n), up(p.high or 0.0)) for n, p in known]
    lower: Points = [(across(n), up(p.low or 0.0)) for n, p in known]
    middle: Points = [(across(n), up(p.median or 0.0)) for n, p in known]
    psi = "no PSI" if feature.psi is None else f"PSI {decimal(feature.psi, 2)}"
    return tag(
        "g",
        tag("title", f"{feature.view}: {feature.feature}, {psi}"),
        label(shortened(feature.feature, LONGEST), x, y + 12, kind="strong"),
        label(f"{shortened(feature.view, LONGEST - 8)} · {psi}", x, y + 26,
              kind="bad" if feature.drifted else "faint"),
        _area([*upper, *reversed(lower)]),
        _path(middle, "line s1"),
        _edges(x, y, significant(low), significant(high)),
    )  # fmt: skip


def _view_cell(view: MonitoredView, x: float, y: float) -> Markup:
    top = max(round_up(max((p.null_rate for p in view.periods), default=0.0)), 0.05)
    across, up = _scales(x, y, len(view.periods), 0.0, top)
    nulls: Points = [(across(n), up(p.null_rate)) for n, p in enumerate(view.periods)]
    base = up(0.0)
    closed = [*nulls, (nulls[-1][0], base), (nulls[0][0], base)] if nulls else []
    ages = [(n, age) for n, age in enumerate(view.ages_hours) if age is not None and is_shown(age)]
    oldest = max([age for _, age in ages], default=0.0)
    _, age_up = _scales(x, y, len(view.periods), 0.0, oldest)
    told = f"age {_age(oldest)} (dashed)" if ages else "age not known"
    return tag(
        "g",
        tag("title", f"{view.view}: nulls up to {percent(top)}, {told}"),
        label(shortened(view.view, LONGEST), x, y + 12, kind="strong"),
        label(told, x, y + 26, kind="faint"),
        _area(closed),
        _path([(across(n), age_up(age)) for n, age in ages], "line s2"),
        _edges(x, y, "0", f"{percent(top, 0)} null"),
    )


def _age(hours: float) -> str:
    """Up to how much, in the unit that leaves a number to read: minutes, hours or days."""
    minutes = round(hours * 60)
    if minutes < 1:
        return "below 1 min"
    if minutes < 90:
        return f"up to {minutes} min"
    return f"up to {hours:.0f} h" if hours < 72 else f"up to {hours / 24:.0f} days"


def _scales(x: float, y: float, num: int, low: float, high: float) -> tuple[Linear, Linear]:
    across = Linear(0.0, float(max(num - 1, 1)), x + 2, x + CELL_WIDTH - 2)
    return across, Linear(low, high if high > low else low + 1.0, y + CELL_HEIGHT, y + TOP)


def _has_band(period: MonitoredPeriod) -> bool:
    return all(v is not None and is_shown(v) for v in (period.low, period.median, period.high))


def _edges(x: float, y: float, low: str, high: str) -> Markup:
    """Labels of both edges stand outside the plot, where no line runs through them."""
    bottom = y + CELL_HEIGHT
    return tag(
        "g",
        line(x, bottom, x + CELL_WIDTH, bottom, "axis"),
        label(high, x + CELL_WIDTH, y + TOP - 5, anchor="end", kind="tick"),
        label(low, x + CELL_WIDTH, bottom + 12, anchor="end", kind="tick"),
    )


def _area(points: Points) -> Markup:
    if len(points) < 3:
        return Markup("")
    return tag("polygon", points=_joined(points), class_="bar soft s1")


def _path(points: Points, kind: str) -> Markup:
    return tag("polyline", points=_joined(points), class_=kind) if points else Markup("")


def _joined(points: Points) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
