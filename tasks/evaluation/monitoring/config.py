"""What the monitoring of features is asked to do."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from tasks.contracts.base import TimeWindow, field_title


class MonitoringConfig(BaseModel):
    """Bounds from a baseline window, and how far a feature may leave it."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    baseline: TimeWindow | None = Field(
        default=None,
        description="Clean window to compare with; none: statistics are kept, nothing is judged.",
    )
    window_days: PositiveInt = Field(
        default=7,
        ge=7,
        description="Days that drift is measured over; single days give large PSI without a fault.",
    )
    min_psi: PositiveFloat = Field(
        default=1.0,
        description="PSI below this is never drift, whatever the noise of the baseline.",
    )
    max_null_rise: float = Field(
        default=0.2, gt=0, lt=1, description="Null rate above the baseline's highest day."
    )
    volume_factor: float = Field(
        default=1.5, gt=1, description="Rows of a day, times or through the baseline's extremes."
    )
    spare_age_h: PositiveFloat = Field(
        default=3.0, description="Hours that the newest row may be older than in the baseline."
    )
