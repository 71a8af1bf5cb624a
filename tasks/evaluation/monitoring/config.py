"""What the monitoring of features is asked to do."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from tasks.contracts.base import TimeWindow, field_title


class MonitoringConfig(BaseModel):
    """What features are compared with over time."""

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
