"""Values about what was served, as the prediction log kept it."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt

from tasks.contracts.base import Artifact, Contract, TimeWindow
from tasks.contracts.data import ValidatedDataset


class ServedWindow(Contract):
    """Rows of the prediction log, in a form that a drift check compares with its reference."""

    dataset: ValidatedDataset = Field(
        description="What one version answered: features as they were served, labels where known."
    )
    reference: ValidatedDataset = Field(
        description="The reference, with the columns that the log has too."
    )
    scores: Artifact = Field(description="Parquet: row id, event time, label, score; same rows.")
    program_sha256: str = Field(min_length=64, max_length=64)
    logged: TimeWindow = Field(description="Moments of the requests, by the server's clock.")
    num_labelled: NonNegativeInt
    left_out: tuple[str, ...] = Field(
        default=(), description="Columns of the reference that the log hides or lacks."
    )
    told: str = Field(description="Where the rows come from, in a sentence.")


class TooFewPredictions(Contract):
    """The log has too little of a window to judge by: no verdict, and nothing is decided."""

    window: TimeWindow = Field(description="In the use case's time.")
    logged: TimeWindow = Field(description="The same by the server's clock.")
    version: str
    num_rows: NonNegativeInt
    num_days: NonNegativeInt
    reason: str
