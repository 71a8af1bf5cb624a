"""What is logged of predictions, what of it is hidden, and for how long it is kept."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.contracts.base import field_title


class PredictionLogConfig(BaseModel):
    """The prediction log of one server."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    enabled: bool = Field(default=True, description="Whether predictions are logged at all.")
    masked: tuple[str, ...] = Field(
        default=(),
        description="Features, entity keys or `subject` of which only a keyed digest is written: "
        "equal values stay equal, and nobody without the key can tell them.",
    )
    left_out: tuple[str, ...] = Field(
        default=(), description="Features, entity keys or `subject` that are not written."
    )
    flush_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="A row is on the disk so long after its answer; a kill loses no more.",
    )
    flush_rows: int = Field(
        default=50_000, ge=1, le=10**7, description="So many rows are written without waiting."
    )
    queue_rows: int = Field(
        default=400_000,
        ge=1,
        le=10**8,
        description="Rows in memory that are not written yet; more are dropped and counted.",
    )
    queue_mb: float = Field(
        default=256.0, gt=0, le=65_536, description="The same bound in memory, roughly."
    )
    refusals_per_s: float = Field(
        default=10.0,
        ge=0,
        le=10_000,
        description="Refused requests that are written, on average; an overload refuses more, "
        "and those are only counted.",
    )
    faults_per_s: float = Field(
        default=200.0,
        ge=0,
        le=10_000,
        description="The same of requests that failed and were not just too many: by these, "
        "releases judge versions.",
    )
    max_answer_values: int = Field(
        default=64,
        ge=1,
        le=4096,
        description="Answers with more numbers a row, such as embeddings, are not written.",
    )
    retention_days: int = Field(
        default=90, ge=1, le=36_500, description="Days are removed when they are older."
    )
    compact_parts: int = Field(
        default=120,
        ge=2,
        le=10_000,
        description="Parts of the present day from which they are merged; a finished day always.",
    )
    upkeep_s: float = Field(
        default=300.0,
        gt=0,
        le=86_400,
        description="How often old days and small parts are seen to.",
    )
    stop_s: float = Field(
        default=10.0, ge=0, le=600, description="A stopping server writes what is left for so long."
    )

    @model_validator(mode="after")
    def _hides_in_one_way(self) -> Self:
        both = sorted(set(self.masked) & set(self.left_out))
        if both:
            raise ValueError(
                f"{', '.join(both)} cannot be masked and left out; name it in one of the two"
            )
        return self

    @model_validator(mode="after")
    def _a_flush_fits_the_queue(self) -> Self:
        if self.flush_rows > self.queue_rows:
            raise ValueError(
                f"flush_rows={self.flush_rows} is above queue_rows={self.queue_rows}: rows would "
                "be dropped before they are written; lower the one or raise the other"
            )
        return self
