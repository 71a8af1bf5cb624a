"""When a run counts as lost, and what is done about it."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.contracts.base import field_title


class RecoveryConfig(BaseModel):
    """Limits of the recovery sweep."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    heartbeat_limit_s: float = Field(
        default=120,
        ge=60,
        le=86_400,
        description="Seconds without a heartbeat after which a run on another host is lost; at "
        "least three times PREFECT_FLOWS_HEARTBEAT_FREQUENCY.",
    )
    second_look_s: float = Field(
        default=35,
        ge=1,
        le=600,
        description="Seconds until a second look confirms what heartbeats or slot counts alone "
        "say; longer than one heartbeat, because a server that was away has heard of none.",
    )
    max_retries: int = Field(
        default=2, ge=0, le=20, description="How often one run that was cut off is started again."
    )
    retry_within_s: float = Field(
        default=3600,
        ge=0,
        le=604_800,
        description="Age in seconds beyond which a run that was cut off is left as it is.",
    )

    @model_validator(mode="after")
    def _second_look_is_within_the_limit(self) -> Self:
        if self.second_look_s > self.heartbeat_limit_s:
            raise ValueError(
                f"second_look_s={self.second_look_s} is longer than heartbeat_limit_s="
                f"{self.heartbeat_limit_s}; make it shorter, or nothing is ever confirmed"
            )
        return self
