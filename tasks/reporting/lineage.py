"""Where the model came from, as a net of channels: raw files on the left, variants on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from tasks.contracts.run import RunRecord
from tasks.reporting.quantities import plural, short_digest, shortened
from tasks.reporting.svg import label, picture, tag

WIDTH = 1060.0
TOP = 40.0
BOX_WIDTH = 152.0
LONGEST = 19
"""Characters of a name that fit a box, in print too."""
EDGE = 1.0
"""Room for half of an outline."""
ROW, LOW_ROW = 48.0, 28.0
MOST_TALL, MOST_BOXES = 9, 24
UPRIGHT_WIDTH = 340.0


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
            (Place(snapshot.feature_service, snapshot.data.sha256, _snapshot_told(record)),),
        ),
        Column("model", (Place(model, version.program_sha256, f"{model}, the program"),)),
        Column(
            "variants",
            tuple(
                Place(v.name, v.files.sha256, v.reason, dropped=not v.kept)
                for v in record.variants
                if v.files is not None
            ),
        ),
    )
    return tuple(column for column in found if column.places)


def _snapshot_told(record: RunRecord) -> str:
    snapshot = record.dataset.snapshot
    number = f" version {snapshot.pins.service_version}" if snapshot.pins else ""
    return f"{snapshot.feature_service}{number}: {plural(snapshot.num_rows, 'row')}"


def lineage_chart(parts: Sequence[Column]) -> Markup:
    """The net lying: a column a kind, channels between them."""
    net = max(column.row * len(column.shown()) for column in parts)
    gap = (WIDTH - 2 * EDGE - BOX_WIDTH * len(parts)) / max(len(parts) - 1, 1)
    lefts = [EDGE + (BOX_WIDTH + gap) * number for number in range(len(parts))]
    middles = [_middles(column, net) for column in parts]
    channels = [
        _channel(lefts[n] + BOX_WIDTH, lefts[n + 1], middles[n], middles[n + 1])
        for n in range(len(parts) - 1)
    ]
    boxes = [
        _box(place, lefts[n], y, column.row)
        for n, column in enumerate(parts)
        for place, y in zip(column.shown(), middles[n], strict=True)
    ]
    titles = [
        label(column.title, left + BOX_WIDTH / 2, 20, anchor="middle", kind="strong")
        for column, left in zip(parts, lefts, strict=True)
    ]
    return picture(
        "Lineage", _told(parts), WIDTH, TOP + net, *channels, *boxes, *titles, kind="flow across"
    )


def _middles(column: Column, net: float) -> list[float]:
    count = len(column.shown())
    first = TOP + (net - column.row * count) / 2 + column.row / 2
    return [first + column.row * number for number in range(count)]


def _channel(
    start: float, end: float, sources: Sequence[float], targets: Sequence[float]
) -> Markup:
    """Straight where each flows into one of its own; else all join one channel across."""
    if len(sources) == len(targets):
        pieces = [f"M {start:.1f} {y:.1f} H {end:.1f}" for y in sources]
    else:
        middle = (start + end) / 2
        every = [*sources, *targets]
        pieces = [f"M {middle:.1f} {min(every):.1f} V {max(every):.1f}"]
        pieces += [f"M {start:.1f} {y:.1f} H {middle:.1f}" for y in sources]
        pieces += [f"M {middle:.1f} {y:.1f} H {end:.1f}" for y in targets]
    return tag("path", d=" ".join(pieces), class_="stream")


def _box(place: Place, left: float, middle: float, row: float) -> Markup:
    tall = row == ROW
    high = row - (10 if tall else 6)
    centre = left + BOX_WIDTH / 2
    words = [label(shortened(place.name, LONGEST), centre, middle + 4, anchor="middle")]
    if tall and place.digest:
        words = [
            label(shortened(place.name, LONGEST), centre, middle - 3, anchor="middle"),
            label(short_digest(place.digest), centre, middle + 12, anchor="middle", kind="digest"),
        ]
    return tag(
        "g",
        tag("title", f"{place.tip} {place.digest}".strip()),
        tag(
            "rect",
            x=left,
            y=middle - high / 2,
            width=BOX_WIDTH,
            height=high,
            rx=7.0,
            class_=f"node{' dropped' if place.dropped else ''}",
        ),
        *words,
    )


def lineage_chart_upright(parts: Sequence[Column]) -> Markup:
    """The same for a narrow screen: kinds beneath each other, each with its versions."""
    left, line_height = 34.0, 21.0
    y = 22.0
    drawn: list[Markup] = []
    basins = []
    for column in parts:
        basins.append(y - 4)
        drawn.append(label(column.title, left, y, kind="strong"))
        for place in column.shown():
            y += line_height
            name = shortened(place.name, 14 if place.dropped else 24)
            if place.dropped:
                name = f"{name} · dropped"
            drawn.append(label(name, left, y, tip=place.tip))
            digest = short_digest(place.digest)
            drawn.append(label(digest, UPRIGHT_WIDTH - 4, y, anchor="end", kind="digest"))
        y += line_height + 14
    marks = [tag("circle", cx=12.0, cy=at, r=7.0, class_="basin") for at in basins]
    runs = [tag("path", d=f"M 12 {a} V {b}", class_="stream") for a, b in pairwise(basins)]
    return picture(
        "Lineage", _told(parts), UPRIGHT_WIDTH, y - 20, *runs, *marks, *drawn, kind="flow upright"
    )


def _told(parts: Sequence[Column]) -> str:
    return "; then ".join(
        f"{column.title}: {', '.join(f'{p.name} {short_digest(p.digest)}' for p in column.places)}"
        for column in parts
    )
