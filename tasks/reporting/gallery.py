"""The pictures of one run, as values; nothing here imports what draws them."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from markupsafe import Markup
from pydantic import GetPydanticSchema
from pydantic_core import core_schema

from tasks.contracts.base import Contract

_AS_TEXT = core_schema.no_info_after_validator_function(Markup, core_schema.str_schema())
Drawing = Annotated[Markup, GetPydanticSchema(lambda kind, handler: _AS_TEXT)]
Drawings = Mapping[str, Markup]
"""Pictures by the key under which the Prefect UI shows them."""
STYLE_SHEET = Path(__file__).with_name("charts.css")


@dataclass(frozen=True)
class Picture:
    """A picture and its caption."""

    caption: str
    drawing: Drawing


class Pictures(Contract):
    """Everything that is drawn of one run; None stands for what was not measured."""

    losses: Drawing
    validation_quality: Drawing
    curves: dict[str, Picture]
    compared: list[Picture]
    slices: tuple[list[Picture], list[Picture]]
    features: Drawing | None
    trades: list[Picture]

    def gallery(self) -> dict[str, Markup]:
        """The pictures worth showing beside a run, by key."""
        features = {"features": self.features} if self.features is not None else {}
        curves = {key: picture.drawing for key, picture in self.curves.items()}
        return {**curves, "learning-curve": self.losses, **features}


def as_data_url(drawing: Markup) -> str:
    """The picture as an image address that needs no file, with its style inside.

    Its background is opaque: the page around it may be light or dark.
    """
    complete = base64.b64encode(as_file(drawing).encode()).decode("ascii")
    return f"data:image/svg+xml;base64,{complete}"


def as_file(drawing: Markup) -> str:
    """The picture as a file of its own, with its style inside."""
    head, tail = str(drawing).split(">", 1)
    style = f"<style>{STYLE_SHEET.read_text(encoding='utf-8')}</style>"
    backdrop = '<rect width="100%" height="100%" class="backdrop"/>'
    return f"{head}>{style}{backdrop}{tail}"
