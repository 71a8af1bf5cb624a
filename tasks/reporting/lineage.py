"""Where the model came from, as a net of channels: raw files on the left, variants on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from matplotlib.patches import FancyBboxPatch

from tasks.contracts.run import RunRecord
from tasks.reporting.drawing import CARD, DROPPED, SOFT, WASH, WATER, Canvas, canvas
from tasks.reporting.quantities import plural, short_digest, shortened

WIDTH = 1060.0
TOP = 40.0
BOX_WIDTH = 152.0
LONGEST = 19
"""Characters of a name that fit a box, in print too."""
EDGE = 1.0
"""Room for half of an outline."""
ROW, LOW_ROW = 48.0, 28.0
MOST_TALL, MOST_BOXES = 9, 24


@dataclass(frozen=True)
class Place:
    """One box: a version of something. `dropped` ones are outlined with dashes."""

    name: str
    digest: str
    tip: str
    dropped: bool = False


@dataclass(frozen=True)
class Column:
    """Things of one kind."""

    title: str
    places: tuple[Place, ...]

    def shown(self) -> tuple[Place, ...]:
        """As many as can be drawn; the last box counts the others."""
        if len(self.places) <= MOST_BOXES:
            return self.places
        hidden = self.places[MOST_BOXES - 1 :]
        names = ", ".join(place.name for place in hidden)
        return (*self.places[: MOST_BOXES - 1], Place(f"and {len(hidden)} more", "", names))

    @property
    def row(self) -> float:
        """Height of one place; many places get a line each, and their digests on hover."""
        return ROW if len(self.places) <= MOST_TALL else LOW_ROW


def columns(record: RunRecord) -> tuple[Column, ...]:
    """What the run's variants came from, from the raw files on; a kind without members is left out.

    The order is that of the record; nothing is computed anew.
    """
    snapshot, version = record.dataset.snapshot, record.version
    landed = record.refresh.rows.landed.tables
    views = snapshot.pins.views if snapshot.pins else {}
    model = f"{version.name} {version.version}"
    found = (
        Column(
            "raw files",
            tuple(
                Place(t.source.uri.rsplit("/", 1)[-1], t.source.sha256, t.source.uri)
                for t in landed
                if t.source is not None
            ),
        ),
        Column(
            "tables",
            tuple(
                Place(t.name, t.artifact.sha256, f"{t.name}: {plural(t.num_rows, 'row')}")
                for t in record.refresh.tables.raw
            ),
        ),
        Column(
            "feature views",
            tuple(
                Place(
                    name,
                    digest,
                    f"{name}@v{views[name].version}" if name in views else name,
                )
                for name, digest in snapshot.feature_views.items()
            ),
        ),
        Column(
            "snapshot",
            (Place(snapshot.feature_service, snapshot.data.sha256, _snapshot_summary(record)),),
        ),
        Column("model", (Place(model, version.program_sha256, f"{model}, the program"),)),
        Column(
            "variants",
            tuple(
                Place(v.name, v.files.sha256, v.reason, dropped=not v.accepted)
                for v in record.variants
                if v.files is not None
            ),
        ),
    )
    return tuple(column for column in found if column.places)


def _snapshot_summary(record: RunRecord) -> str:
    snapshot = record.dataset.snapshot
    number = f" version {snapshot.pins.service_version}" if snapshot.pins else ""
    return f"{snapshot.feature_service}{number}: {plural(snapshot.num_rows, 'row')}"


def lineage_chart(parts: Sequence[Column]) -> Markup:
    """A column a kind, channels between them."""
    net = max(column.row * len(column.shown()) for column in parts)
    gap = (WIDTH - 2 * EDGE - BOX_WIDTH * len(parts)) / max(len(parts) - 1, 1)
    lefts = [EDGE + (BOX_WIDTH + gap) * number for number in range(len(parts))]
    middles = [_middles(column, net) for column in parts]
    with canvas(WIDTH, TOP + net, (0, 0, 0, 0)) as drawing:
        drawing.axes.set_axis_off()
        drawing.axes.set(xlim=(0, WIDTH), ylim=(TOP + net, 0))
        for n in range(len(parts) - 1):
            _channel(drawing, lefts[n] + BOX_WIDTH, lefts[n + 1], middles[n], middles[n + 1])
        for n, column in enumerate(parts):
            drawing.write(
                lefts[n] + BOX_WIDTH / 2, 16, column.title, ha="center", fontweight="bold"
            )
            for place, middle in zip(column.shown(), middles[n], strict=True):
                _box(drawing, place, lefts[n], middle, column.row)
        return drawing.svg("Lineage", _described(parts), "flow across")


def _middles(column: Column, net: float) -> list[float]:
    count = len(column.shown())
    first = TOP + (net - column.row * count) / 2 + column.row / 2
    return [first + column.row * number for number in range(count)]


def _channel(
    drawing: Canvas, start: float, end: float, sources: Sequence[float], targets: Sequence[float]
) -> None:
    """Straight where each flows into one of its own; else all join one channel across."""
    style: dict[str, Any] = {"colors": WASH, "linewidth": 7, "capstyle": "round"}
    if len(sources) == len(targets):
        drawing.axes.hlines(sources, start, end, **style)
        return
    middle, every = (start + end) / 2, [*sources, *targets]
    drawing.axes.vlines(middle, min(every), max(every), **style)
    drawing.axes.hlines(sources, start, middle, **style)
    drawing.axes.hlines(targets, middle, end, **style)


def _box(drawing: Canvas, place: Place, left: float, middle: float, row: float) -> None:
    tall = row == ROW
    high, centre = row - (10 if tall else 6), left + BOX_WIDTH / 2
    edge = DROPPED if place.dropped else {"facecolor": CARD, "edgecolor": WATER, "linewidth": 1.5}
    shape = "round,pad=0,rounding_size=7"
    corner = (left, middle - high / 2)
    box = FancyBboxPatch(corner, BOX_WIDTH, high, boxstyle=shape, **edge)
    drawing.tip(drawing.axes.add_patch(box), f"{place.tip} {place.digest}".strip())
    lift = 7 if tall and place.digest else 0
    drawing.write(centre, middle - lift, shortened(place.name, LONGEST), ha="center")
    if lift:
        digest = short_digest(place.digest)
        drawing.write(centre, middle + 8, digest, ha="center", color=SOFT, fontsize=10.5)


def _described(parts: Sequence[Column]) -> str:
    return "; then ".join(
        f"{column.title}: {', '.join(f'{p.name} {short_digest(p.digest)}' for p in column.places)}"
        for column in parts
    )
