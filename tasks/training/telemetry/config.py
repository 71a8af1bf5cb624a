"""What is measured of a training run, and at which prices."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from tasks.contracts.base import field_title


class TelemetryConfig(BaseModel):
    """Profile and prices of one training run; changes nothing that it computes."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    profile: bool = Field(
        default=False,
        description="Record five steps of every rank with torch.profiler, and their collectives "
        "with Horovod's timeline; the traces are kept with the model.",
    )
    watts_per_core: float | None = Field(
        default=None,
        gt=0,
        le=200,
        description="Watts of one busy core, for an estimate where no meter can be read; none: no "
        "estimate.",
    )
    price_per_kwh: float | None = Field(
        default=None, ge=0, le=1000, description="Price of a kilowatt hour; none: not known."
    )
    price_per_node_hour: float | None = Field(
        default=None,
        ge=0,
        le=100_000,
        description="Price of one host for an hour; none: not known.",
    )
    currency: str = Field(
        default="EUR", pattern=r"^[A-Z]{3}$", description="ISO 4217 code of both prices."
    )
