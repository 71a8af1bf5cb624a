"""The pictures of one run: drawn once for what they show, and found again by runs that show it too.

Nothing here imports matplotlib, which takes half a second, before there is something to draw.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from markupsafe import Markup
from pydantic import GetPydanticSchema
from pydantic_core import core_schema

from tasks.contracts.base import Contract
from tasks.contracts.run import RunRecord
from tasks.kernel.settings import ArtifactStore, code_digest, content_key

_AS_TEXT = core_schema.no_info_after_validator_function(Markup, core_schema.str_schema())
Drawing = Annotated[Markup, GetPydanticSchema(lambda kind, handler: _AS_TEXT)]
Drawings = Mapping[str, Markup]
"""Pictures by the key under which the Prefect UI shows them."""
KIND = "pictures"
SHOWN = {"model", "evaluation", "variants"}
"""Fields of a record that are drawn, beside what was seen of its features."""


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


def pictures_of(record: RunRecord, store: ArtifactStore) -> Pictures:
    """The pictures of a run, drawn here unless the store has them.

    Raises:
        StorageError: the disk refused a write.
    """

    def build(_: object) -> Pictures:
        from tasks.reporting.pictures import draw

        return draw(record)

    code = code_digest(str(Path(__file__).with_name("pictures.py")))
    shown = record.model_dump(mode="json", include=SHOWN)
    key = content_key(code, shown, record.refresh.monitoring)
    return store.build_once(KIND, key, Pictures, build)
