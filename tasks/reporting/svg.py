"""Writing SVG: tags whose attributes and text are escaped by construction, and whole pictures."""

from __future__ import annotations

import base64
from pathlib import Path

from markupsafe import Markup, escape

from tasks.reporting.quantities import is_shown, printable

STYLE_SHEET = Path(__file__).parent / "charts.css"
CHARACTER_WIDTH = 0.56  # of the font size: the mean of the system fonts' digits and letters


def tag(name: str, /, *children: str, **attributes: object) -> Markup:
    """One element. `stroke_width` becomes `stroke-width`; an attribute that is None is left out.

    Children that are not `Markup` are text and are escaped, so no name out of the data can become
    a tag.

    Raises:
        ValueError: a number is not finite; callers leave such values out.
    """
    written = [
        f' {key.rstrip("_").replace("_", "-")}="{escape(_attribute(value))}"'
        for key, value in attributes.items()
        if value is not None
    ]
    inside = "".join(
        child if isinstance(child, Markup) else escape(printable(child)) for child in children
    )
    opening = f"<{name}{''.join(written)}"
    return Markup(f"{opening}>{inside}</{name}>" if inside else f"{opening}/>")


def _attribute(value: object) -> str:
    if isinstance(value, float):
        if not is_shown(value):
            raise ValueError(f"{value} cannot be drawn; expected a finite number")
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return printable(value)


def label(
    text: str, x: float, y: float, *, anchor: str = "start", kind: str = "label", tip: str = ""
) -> Markup:
    """Text at (x, y), where y is its base line; `tip` is shown on hover."""
    inside = [tag("title", tip)] if tip else []
    return tag("text", *inside, text, x=x, y=y, text_anchor=anchor, class_=kind)


def line(x1: float, y1: float, x2: float, y2: float, kind: str, *children: str) -> Markup:
    """A straight line."""
    return tag("line", *children, x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def text_width(text: str, font_size: float = 12) -> float:
    """Rough width in pixels, on the generous side."""
    return len(text) * font_size * CHARACTER_WIDTH


def picture(
    title: str, description: str, width: float, height: float, *children: str, kind: str = ""
) -> Markup:
    """A whole picture with its accessible name and description.

    The page shrinks it with its column, down to where its text stays legible.
    """
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        role="img",
        class_=f"chart {kind}".strip(),
    )


def as_data_url(drawing: Markup) -> str:
    """The picture as an image address that needs no file, with its style inside.

    Its background is opaque: the page around it may be light or dark.
    """
    style = tag("style", Markup(STYLE_SHEET.read_text(encoding="utf-8")))
    backdrop = tag("rect", width="100%", height="100%", class_="backdrop")
    head, tail = str(drawing).split(">", 1)
    whole = f"{head}>{style}{backdrop}{tail}"
    return f"data:image/svg+xml;base64,{base64.b64encode(whole.encode()).decode('ascii')}"
