"""What a serving process shows of itself: metrics, traces, logs, status page."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import (
    AnyHttpUrl,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
)

from tasks.contracts.base import field_title


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)


class TraceConfig(_Config):
    """Where spans go, and of which calls."""

    endpoint: AnyHttpUrl | None = Field(
        default=None,
        description="OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; None sends nothing. "
        "Credentials come from OTEL_EXPORTER_OTLP_HEADERS.",
    )
    file: Path | None = Field(
        default=None, description="JSON lines, one a span; for places without a collector."
    )
    ratio: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Share of calls without a trace of their own that begin one. A call that "
        "brings a `traceparent` follows its caller's decision.",
    )
    max_waiting: PositiveInt = Field(
        default=4096, description="Calls whose spans wait to be sent; more are dropped, counted."
    )
    every_s: PositiveFloat = Field(default=2.0, description="Seconds between exports.")
    timeout_s: PositiveFloat = Field(default=5.0, description="Patience with the collector.")

    @property
    def is_on(self) -> bool:
        """Whether spans go anywhere."""
        return self.endpoint is not None or self.file is not None


class LogConfig(_Config):
    """The process's log: JSON lines."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Least important line that is written."
    )
    file: Path | None = Field(default=None, description="None is standard error.")
    access_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of answered calls with a line of their own; refusals of the server "
        "itself (5xx) have one wherever this is above 0.",
    )
    max_waiting: PositiveInt = Field(
        default=4096, description="Lines that wait to be written; more are dropped, counted."
    )


class ObservabilityConfig(_Config):
    """Everything that is shown of one serving process."""

    traces: TraceConfig = TraceConfig()
    logs: LogConfig = LogConfig()
    step_s: PositiveFloat = Field(
        default=5.0, description="Seconds between points of the status page's curves."
    )
    num_steps: PositiveInt = Field(default=120, description="Points that are kept.")
    recent_s: PositiveFloat = Field(
        default=60.0, description="Rates and percentiles on the status page are of so long."
    )
    drift_every_s: NonNegativeFloat = Field(
        default=30.0, description="Seconds between looks at the newest drift verdicts."
    )
    refresh_s: PositiveFloat = Field(default=5.0, description="How often the page asks again.")
