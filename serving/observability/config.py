"""What a serving process shows of itself: metrics, traces, logs, status page."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import AnyHttpUrl, BaseModel, ConfigDict, Field

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


class LogConfig(_Config):
    """The process's log: JSON lines."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Least important line that is written."
    )
    file: Path | None = Field(default=None, description="None is standard error.")


class ObservabilityConfig(_Config):
    """Everything that is shown of one serving process."""

    traces: TraceConfig = TraceConfig()
    logs: LogConfig = LogConfig()
