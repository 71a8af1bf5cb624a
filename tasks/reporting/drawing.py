"""Pictures drawn by matplotlib in one style, as SVG that follows the page's colours.

Importing this module imports matplotlib (half a second), so only what draws imports it.
"""

import io
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib import ticker
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from tasks.reporting.quantities import is_shown, printable, shortened, significant

FOLDER = Path(__file__).parent
# Matplotlib draws with these; the page replaces each by the variable of that name in `charts.css`,
# which has another value in the dark.
CARD, INK, SOFT, GRID = "#ffffff", "#17262c", "#55676f", "#e4e1d8"
WATER, SAND, VIOLET, STONE = "#0b6788", "#c2620f", "#7b4fa0", "#8b979c"
WASH, BAD = "#d9ebf1", "#b3341c"
_VARIABLES = {
    CARD: "card", INK: "ink", SOFT: "soft", GRID: "line", WATER: "water", SAND: "sand",
    VIOLET: "violet", STONE: "stone", WASH: "wash", BAD: "bad",
}  # fmt: skip
LINES: tuple[dict[str, Any], ...] = (
    {"color": WATER, "linestyle": "-"},
    {"color": SAND, "linestyle": (0, (3, 1.8))},
    {"color": VIOLET, "linestyle": (0, (0.7, 1.8))},
)
"""First, second and third line of a chart: told apart without colour too."""
BASELINE: dict[str, Any] = {"color": STONE, "linewidth": 1.5, "linestyle": (0, (3.3, 2.7))}
MARKED: dict[str, Any] = {"color": SAND, "linewidth": 1.5, "linestyle": (0, (1.3, 2))}
DROPPED: dict[str, Any] = {
    "facecolor": CARD, "edgecolor": STONE, "linewidth": 1.25, "linestyle": (0, (2.4, 1.6)),
}  # fmt: skip
CHARACTER_WIDTH = 6.8
"""Pixels of the mean letter: the system fonts of the reader are not those of this machine."""
LONGEST_NAME = 24
Point = tuple[float, float]
_STYLING = threading.RLock()
_TIP = re.compile(r'<g id="tip-(\d+)">')
_NOT_DRAWN = re.compile(
    r"<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>|font-family: [^;\"]*;? ?"
    r'| transform="rotate\(-0[^"]*"| id="(?![mp][0-9a-f]{10}")[^"]*"|\n(?=[A-Za-z ])',
    re.DOTALL,
)
_COLOUR = re.compile("|".join(_VARIABLES))
_HEAD = re.compile(r".*?<svg[^>]*>", re.DOTALL)


class Canvas:
    """One picture: a figure in pixels with one plotting area, and the words shown on hover."""

    def __init__(self, width: float, height: float, margins: Sequence[float]) -> None:
        """`margins` around the plotting area: left, right, top, bottom, in pixels."""
        left, right, top, bottom = margins
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / 72, height / 72))
        self.axes = self.add(left, top, width - left - right, height - top - bottom)
        self._tips: list[str] = []

    def add(self, left: float, top: float, width: float, height: float) -> Axes:
        """A further plotting area, measured from the upper left corner."""
        w, h = self.width, self.height
        return self.figure.add_axes((left / w, 1 - (top + height) / h, width / w, height / h))

    def write(self, x: float, y: float, text: object, **style: Any) -> Any:
        """Words at a place in pixels from the upper left corner; y is the middle of the line."""
        placed = {"va": "center", **style}
        return self.figure.text(x / self.width, 1 - y / self.height, printable(text), **placed)

    def tip(self, artist: Artist, text: str) -> None:
        """Words that are shown when the pointer rests on something drawn."""
        artist.set_gid(f"tip-{len(self._tips)}")
        self._tips.append(text)

    def titles(self, x_title: str, y_title: str = "") -> None:
        """What the axes mean; the upright one in plain reading direction, at the upper left."""
        plain_numbers(self.axes.xaxis)
        self.axes.set_xlabel(printable(x_title))
        if y_title:
            plain_numbers(self.axes.yaxis)
            top = (1 - self.axes.get_position().y1) * self.height
            self.write(4, top - 22, y_title, color=SOFT)

    def legend(self, artists: Sequence[Artist], names: Sequence[str]) -> None:
        """What is what, in one line above the picture."""
        self.figure.legend(
            list(artists), [printable(name) for name in names],
            loc="upper left", bbox_to_anchor=(4 / self.width, 1 - 8 / self.height), ncols=9,
        )  # fmt: skip

    def rows(
        self,
        names: Sequence[str],
        tips: Sequence[str] = (),
        strong: Sequence[bool] = (),
        align: str = "center",
    ) -> None:
        """Named rows from the top down, row n at y = n; the whole name shows on hover."""
        self.axes.set_yticks([])
        self.axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
        self.axes.spines["bottom"].set_visible(False)
        frame = self.axes.get_yaxis_transform()
        for n, name in enumerate(names):
            weight = "bold" if n < len(strong) and strong[n] else "normal"
            style = {"ha": "right", "va": align, "fontweight": weight, "xycoords": frame}
            label = self.note(shortened(name, LONGEST_NAME), (0, n), (-7, 0), **style)
            self.tip(label, tips[n] if tips else name)

    def note(
        self, text: str, at: tuple[Any, float], offset: Point = (0, 0), **style: Any
    ) -> Artist:
        """Words at a place in the data's units, moved by some pixels to the right and up."""
        return self.axes.annotate(
            printable(text), at, xytext=offset, textcoords="offset pixels",
            annotation_clip=False, **{"va": "center", **style},
        )  # fmt: skip

    def beside(self, row: float, text: str, offset: float, **style: Any) -> None:
        """Words to the right of the plotting area, at a row."""
        frame = self.axes.get_yaxis_transform()
        self.note(text, (1, row), (offset, 0), xycoords=frame, **style)

    def reference(self, value: float | None, text: str) -> None:
        """An upright line that values are compared with, and what it is."""
        self._upright(value, text, BASELINE, color=SOFT)

    def mark(self, value: float | None, text: str) -> None:
        """An upright line that points a value out, and what it is."""
        self._upright(value, text, MARKED, color=SAND, fontweight="bold")

    def _upright(self, value: float | None, text: str, line: dict[str, Any], **style: Any) -> None:
        if is_shown(value):
            left, right = self.axes.get_xlim()
            share = (value - left) / (right - left)
            side = "left" if share < 0.12 else "right" if share > 0.88 else "center"
            self.axes.axvline(value, **line)
            frame = self.axes.get_xaxis_transform()
            self.note(text, (value, 1), (0, 6), xycoords=frame, ha=side, va="bottom", **style)

    def svg(self, title: str, description: str, kind: str = "") -> Markup:
        """The picture with its accessible name and description; the same for the same values.

        Colours are the page's variables, letters are text. `kind` is a class of the style sheet.
        """
        matplotlib.rcParams["svg.hashsalt"] = title
        drawn = io.StringIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a letter that the measuring font lacks
            self.figure.savefig(drawn, format="svg", metadata={"Date": None})
        text = _HEAD.sub("", drawn.getvalue(), count=1)
        text = _TIP.sub(lambda m: f"<g><title>{_escaped(self._tips[int(m[1])])}</title>", text)
        text = text.replace("xlink:href", "href")
        text = _COLOUR.sub(lambda m: f"var(--{_VARIABLES[m[0]]})", _NOT_DRAWN.sub("", text))
        size = f"{self.width:.0f}", f"{self.height:.0f}"
        return Markup(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
            f'width="{size[0]}" height="{size[1]}" role="img" '
            f'class="{f"chart {kind}".strip()}"><title>{_escaped(title)}</title>'
            f"<desc>{_escaped(description)}</desc>{text}"
        )


@contextmanager
def canvas(
    width: float = 520, height: float = 300, margins: Sequence[float] = (54, 14, 66, 48)
) -> Iterator[Canvas]:
    """A picture to draw on in the style of `report.mplstyle`; it is drawn and read inside."""
    with _STYLING, matplotlib.rc_context(_style()):
        yield Canvas(width, height, margins)


@cache
def _style() -> Any:
    """The style sheet, read once: reading it takes as long as drawing a small picture."""
    return matplotlib.rc_params_from_file(FOLDER / "report.mplstyle", use_default_template=False)


def name_width(names: Sequence[str]) -> float:
    """Pixels that the names of rows need beside the plotting area."""
    return CHARACTER_WIDTH * max([min(len(n), LONGEST_NAME) for n in names] + [4]) + 16


def plain_numbers(axis: Axis) -> None:
    """Ticks at few round numbers, written out."""
    if axis.get_scale() == "linear":
        box = axis.axes.bbox
        room = box.width / 60 if axis is axis.axes.xaxis else box.height / 34
        axis.set_major_locator(
            ticker.MaxNLocator(max(2, min(6, int(room))), steps=[1, 2, 2.5, 5, 10])
        )
        if max(map(abs, axis.get_view_interval())) >= 1e4:
            axis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    else:
        low, high = axis.get_view_interval()
        subs = (1.0, 2.0, 5.0) if high < 30 * low else (1.0,)
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=7))
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: significant(value, 1)))
        axis.set_minor_locator(ticker.NullLocator())


def whole_numbers(axis: Axis) -> None:
    """Ticks at whole numbers only."""
    axis.set_major_locator(ticker.MaxNLocator(10, integer=True))


def limits(*values: float, margin: float = 0.06) -> tuple[float, float]:
    """Lowest and highest of the values that can be drawn, with a margin; never an empty span."""
    shown = [v for v in values if is_shown(v)]
    low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
    if high - low < 1e-9 * max(1.0, abs(high), abs(low)):
        spare = max(abs(high) * 0.05, 0.5 if high == round(high) else 0.005)
    else:
        spare = (high - low) * margin
    return low - spare, high + spare


def _escaped(text: str) -> str:
    return str(escape(printable(text)))
