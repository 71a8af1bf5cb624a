"""Where a model comes from that was trained elsewhere, and what calibrates and judges it."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from tasks.contracts.base import field_title
from tasks.contracts.conversion import Signature


class EncoderConfig(BaseModel):
    """A text encoder that was trained elsewhere."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    package: str | None = Field(
        default=None, description="Installed package that carries the files; None for a folder."
    )
    folder: Path = Field(
        description="Folder with config.json, model.safetensors and tokenizer.json, as the package "
        "lists it, or on this machine."
    )
    max_tokens: PositiveInt = Field(
        default=256, le=4096, description="Most tokens of a text; longer ones are cut."
    )
    max_rows: PositiveInt = Field(
        default=4096, le=65_536, description="Most texts of a call of the exported program."
    )


class CorpusConfig(BaseModel):
    """Texts that calibrate and judge: docstrings of installed packages, or lines of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    packages: tuple[str, ...] = Field(
        default=(), description="Installed packages whose docstrings are the texts."
    )
    file: Path | None = Field(default=None, description="UTF-8 file with one text a line.")
    calibration_texts: PositiveInt = Field(
        default=320, le=100_000, description="Texts that show INT8 the value ranges."
    )
    judged_texts: int = Field(
        default=512, ge=8, le=20_000, description="Other texts that the variants are compared on."
    )
    min_words: PositiveInt = Field(default=4, description="Words of the shortest text.")
    max_words: PositiveInt = Field(
        default=60, le=2000, description="Words of the longest text that is taken."
    )
    seed: NonNegativeInt = Field(default=0, description="Seed of the choice of texts.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.packages) == (self.file is not None):
            raise ValueError(
                "a corpus has either packages or a file; name the one that is to be read"
            )
        if self.min_words > self.max_words:
            raise ValueError(
                f"min_words={self.min_words} is above max_words={self.max_words}, so no text "
                "would be taken"
            )
        return self


class ProgramConfig(BaseModel):
    """A program of any family that was exported elsewhere."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    file: Path = Field(description="`.pt2` file, as `torch.export.save` writes it.")
    family: str = Field(
        default="tensors",
        min_length=1,
        description="Family of models, as conversion knows it; `tensors` takes any.",
    )
    signature: Signature = Field(description="What the program takes and gives.")
    origin: dict[str, str] = Field(
        default={}, description="Where it comes from: package, version, licence."
    )


class RowsConfig(BaseModel):
    """Model inputs that were prepared elsewhere, as the family reads them."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    file: Path = Field(
        description="Parquet; the column `part` says `calibration` or `judged` of each row, one "
        "for each input holds what it takes of the row, `label` what is true where that is known."
    )
    made_from: dict[str, str] = Field(default={}, description="Sources and their versions.")
