"""How requests that name entities are answered: moments and bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from tasks.contracts.base import field_title
from tasks.contracts.clock import ClockConfig
from tasks.features.config import OnlineConfig
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import read_yaml
from tasks.kernel.settings import USE_CASE_FILE


class EntityConfig(BaseModel):
    """What a serving process does with a request that names entities."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    moment: Literal["use_case", "wall"] | AwareDatetime = Field(
        default="use_case",
        description="Moment at which ages count: the use case's clock, which may replay a year; "
        "the wall clock; or a moment, as 2014-01-01T05:30:00Z, for trials with recorded data.",
    )
    max_rows: PositiveInt = Field(
        default=4096, description="Rows of a request, and of requests that share a read."
    )


def read_use_case(repo: Path) -> tuple[OnlineConfig, ClockConfig]:
    """What a feature repository says of reads and of its clock.

    Raises:
        ConfigurationError: the file is missing or is not what it should be.
    """
    file = repo / USE_CASE_FILE
    try:
        described = read_yaml(file, USE_CASE_FILE)
        online = (described.get("features") or {}).get("online") or {}
        clock = described.get("clock") or {}
        return OnlineConfig.model_validate(online), ClockConfig.model_validate(clock)
    except (OSError, ConfigurationError, ValidationError, AttributeError) as exc:
        raise ConfigurationError(
            f"{file} cannot be read as a use case ({exc}); name a feature repository with "
            "FALAJ_FEATURE_REPO. No entity request can be served"
        ) from exc
