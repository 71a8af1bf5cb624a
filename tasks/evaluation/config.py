"""How models are judged, and what the baseline model may spend."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from tasks.contracts.base import field_title

MONTH = "month"


class EvaluationConfig(BaseModel):
    """Slices of one judgement, and the fewest rows that are judged."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    slices: tuple[str, ...] = Field(
        default=(MONTH,),
        max_length=20,
        description="Columns by whose values quality is also shown; `month` is the calendar month "
        "of the event time in UTC.",
    )
    min_slice_rows: int = Field(
        default=500, ge=2, le=1_000_000, description="A slice with fewer rows is not judged."
    )
    min_slice_positives: int = Field(
        default=50,
        ge=1,
        le=1_000_000,
        description="A slice with fewer rows of either label is not judged.",
    )
    min_days: int = Field(
        default=7,
        ge=2,
        le=366,
        description="Fewer UTC days give no interval: rows of one day resemble each other.",
    )


class BaselineModelConfig(BaseModel):
    """Gradient boosting with ordinary settings: good without a search, cheap, reproducible."""

    model_config = ConfigDict(frozen=True, extra="forbid", field_title_generator=field_title)

    max_iterations: int = Field(
        default=300, ge=1, le=5000, description="Trees at most; the validation window picks."
    )
    min_leaf_rows: int = Field(
        default=100, ge=1, le=100_000, description="Rows of a leaf, at least."
    )
