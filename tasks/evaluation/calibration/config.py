"""Which rows a new map of the scores is fitted to, and which judge it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from tasks.contracts.base import field_title


class RecalibrationConfig(BaseModel):
    """Bounds of a recalibration; the window itself is that of the drift check."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    holdout_days: int = Field(
        default=14,
        ge=2,
        le=366,
        description="Days at the end of the window that judge the new map; it is fitted to the "
        "days before them.",
    )
    min_rows: int = Field(
        default=500,
        ge=50,
        le=10_000_000,
        description="With fewer labelled rows to fit to, the scores are left as they are.",
    )
    min_positives: int = Field(
        default=50,
        ge=5,
        le=10_000_000,
        description="Of a classification: the same, with fewer rows of either label.",
    )
