"""When a run counts as lost, and what is done about it."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.contracts.base import field_title


class RecoveryConfig(BaseModel):
    """Limits of the recovery sweep."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    dead_process_s: float = Field(
        default=15,
        ge=1,
        le=600,
        description="Seconds that a run may stay Running after its process on this host is gone; "
        "its worker has that long to say so itself.",
    )
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
    cancel_limit_s: float = Field(
        default=20, ge=1, le=3600, description="Seconds that a cancellation may take."
    )
    pending_limit_s: float = Field(
        default=300,
        ge=10,
        le=86_400,
        description="Seconds between a worker's taking a run and the run's beginning.",
    )
    late_limit_s: float = Field(
        default=300, ge=10, le=604_800, description="Seconds after which an untaken run is told of."
    )
    parent_grace_s: float = Field(
        default=30,
        ge=0,
        le=3600,
        description="Seconds that a stage's run may go on after the loop that started it ended.",
    )
    leftover_grace_s: float = Field(
        default=30,
        ge=5,
        le=3600,
        description="Seconds that processes of a run may live on after the run has ended.",
    )
    end_grace_s: float = Field(
        default=5, ge=0, le=60, description="Seconds between SIGTERM and SIGKILL."
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
    task_grace_s: float = Field(
        default=120,
        ge=1,
        le=3600,
        description="Seconds until a step of a dead attempt, of which no end was heard, is ended: "
        "steps are recorded late.",
    )

    @model_validator(mode="before")
    @classmethod
    def _flows_say_it_themselves(cls, given: Any) -> Any:
        if isinstance(given, dict) and "retried_flows" in given:
            raise ValueError(
                "retried_flows is no limit any more: each flow says itself whether its runs are "
                "started again; remove it, and set max_retries to 0 to start none again"
            )
        return given

    @model_validator(mode="after")
    def _second_look_is_within_the_limit(self) -> Self:
        if self.second_look_s > self.heartbeat_limit_s:
            raise ValueError(
                f"second_look_s={self.second_look_s} is longer than heartbeat_limit_s="
                f"{self.heartbeat_limit_s}; make it shorter, or nothing is ever confirmed"
            )
        return self
