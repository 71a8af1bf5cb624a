"""What an import is described by: a file that is read before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flows.config import faults
from tasks.contracts.base import field_title
from tasks.conversion.config import ConversionConfig
from tasks.imports.config import CorpusConfig, EncoderConfig, ProgramConfig, RowsConfig
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.strict_yaml import read_yaml
from tasks.registry.config import RegistryConfig


class ImportConfig(BaseModel):
    """One model that was trained elsewhere: its files, its texts, its name, its conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    encoder: EncoderConfig | None = Field(default=None, description="Files of a text encoder.")
    corpus: CorpusConfig | None = Field(default=None, description="Texts for the encoder.")
    program: ProgramConfig | None = Field(default=None, description="A program that is ready.")
    rows: RowsConfig | None = Field(default=None, description="Rows that are ready.")
    registry: RegistryConfig = Field(description="Name that the model is registered under.")
    conversion: ConversionConfig = Field(
        default=ConversionConfig(), description="What it is converted into, and when that is kept."
    )

    @model_validator(mode="after")
    def _one_model_and_its_rows(self) -> Self:
        if (self.encoder is None) == (self.program is None):
            raise ValueError("an import has either an encoder or a program; name one of them")
        if (self.corpus is None) == (self.rows is None):
            raise ValueError("an import has either a corpus or rows; name one of them")
        if self.corpus is not None and self.encoder is None:
            raise ValueError("a corpus is read with an encoder's tokenizer; give a program rows")
        return self


def read_import_config(file: Path) -> ImportConfig:
    """The import that a file describes.

    Raises:
        ConfigurationError: the file is missing, is no YAML, or says something that cannot be.
    """
    try:
        return ImportConfig.model_validate(read_yaml(file, file.name))
    except FileNotFoundError as exc:
        raise ConfigurationError(f"{file} does not exist; name the file of an import") from exc
    except ValidationError as exc:
        raise ConfigurationError(f"{file.name}: {faults(exc)}. Nothing was run") from exc
