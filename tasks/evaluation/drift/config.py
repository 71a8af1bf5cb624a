"""What counts as drift, as a fault of the data, and as a loss of performance."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from tasks.contracts.base import field_title


class DriftVolume(BaseModel):
    """How many new rows start a drift check, between those that a schedule starts."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    table: str = Field(
        min_length=1, description="Raw table whose rows are counted; one with a time column."
    )
    rows: int = Field(
        ge=1,
        le=10**12,
        description="Rows after the window of the newest drift result, their labels known by the "
        "clock, that start a check.",
    )


class ServedDrift(BaseModel):
    """Drift checks of what was served, as the prediction log kept it."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    min_rows: int = Field(
        default=1000,
        ge=1,
        le=10**9,
        description="Rows that the stable version has answered in the window; with fewer there is "
        "no result.",
    )
    volume_rows: int | None = Field(
        default=None,
        ge=1,
        le=10**12,
        description="Answered rows after the newest drift result's window that start a check on a "
        "platform; none: schedules alone do.",
    )


class DriftConfig(BaseModel):
    """Limits of one drift check; logged whole with the run."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    volume: DriftVolume | None = Field(
        default=None,
        description="New rows that start a check on a platform; none: schedules alone do.",
    )
    served: ServedDrift = Field(
        default=ServedDrift(), description="Checks of the prediction log instead of the features."
    )

    # Drift
    min_effect: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="A feature has drifted where the lower bound of its effect (KS or total "
        "variation distance, 0 to 1) is above this: about the share of rows that moved.",
    )
    min_days: int = Field(
        default=7, ge=4, le=366, description="UTC days with rows that a window needs."
    )

    # Performance
    min_auc_drop: float = Field(
        default=0.02, ge=0, le=0.5, description="A smaller loss of AUC is no reason to retrain."
    )
    min_r2_drop: float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="Of a regression: a smaller loss of R2 is no reason to retrain.",
    )
    min_skill_drop: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Of a regression: loss of skill (over the baseline, on the same rows) from "
        "which the model has gone stale. A window that is harder for all costs R2, not skill.",
    )
