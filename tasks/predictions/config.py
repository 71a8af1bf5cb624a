"""What is logged of predictions, what of it is hidden, and for how long it is kept."""

from typing import Self

from pydantic import Field, model_validator

from tasks.kernel.values import Described

FLUSH_ROWS = 50_000
"""So many rows are written without waiting; fewer where the queue is shorter."""
QUEUE_BYTES = 256_000_000
REFUSALS_PER_S = 10.0
"""Rejected requests that are written, on average: an overload rejects more, which are counted."""
FAULTS_PER_S = 200.0
"""The same of requests that failed and were not just too many: releases judge versions by them."""
MAX_ANSWER_VALUES = 64
"""Answers with more numbers a row, such as embeddings, are not written."""
UPKEEP_S = 300.0
STOP_S = 10.0
"""A stopping server writes what is left for so long."""


class PredictionLogConfig(Described):
    """The prediction log of one server."""

    enabled: bool = Field(default=True, description="Whether predictions are logged at all.")
    masked: tuple[str, ...] = ()
    """Features, entity keys or `subject` of which only a keyed digest is written: equal values stay
    equal, and nobody without the key can tell them."""
    left_out: tuple[str, ...] = ()
    """Features, entity keys or `subject` that are not written."""
    flush_s: float = Field(default=10.0, gt=0, le=3600)
    """A row is on the disk so long after its answer; a kill loses no more."""
    queue_rows: int = Field(default=400_000, ge=1, le=10**8)
    """Rows in memory that are not written yet; more are dropped and counted."""
    retention_days: int = Field(default=90, ge=1, le=36_500)
    """Days are removed when they are older."""

    @model_validator(mode="after")
    def _hides_in_one_way(self) -> Self:
        both = sorted(set(self.masked) & set(self.left_out))
        if both:
            raise ValueError(
                f"{', '.join(both)} cannot be masked and left out; name it in one of the two"
            )
        return self
