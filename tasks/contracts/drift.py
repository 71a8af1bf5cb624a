"""Values about how far a window has moved from the training reference.

Values about what was served, as the prediction log kept it.
"""

from datetime import date
from enum import StrEnum

from pydantic import Field, NonNegativeInt, PositiveInt

from tasks.contracts.base import RESULT, Artifact, Contract, TimeWindow
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.evaluation import Metric, Quality
from tasks.kernel.values import Described


class FeatureDrift(Contract):
    """Change of one feature between the reference and the current window."""

    feature: str
    kind: str = Field(description="`numeric` or `categorical`.")
    psi: float
    psi_noise: float = Field(description="PSI expected from sampling alone.")
    effect: float = Field(description="KS distance or total variation distance, 0 to 1.")
    effect_low: float = Field(description="Lower confidence bound of the effect.")
    missing_reference: float
    missing_current: float
    drifted: bool
    evidence: str


class DriftResult(StrEnum):
    """What a drift check advises; whether to act on it is for the caller."""

    STABLE = "stable"
    WATCH = "watch"
    RETRAIN = "retrain"
    DATA_FAULT = "data_fault"


class DayErrors(Contract):
    """How far the scores of one day were from its labels: means over its labelled rows."""

    day: date = Field(description="UTC.")
    num_rows: PositiveInt
    bias: float = Field(description="Of label minus score.")
    slope: float = Field(description="Of label minus score, times the score's logit, or the score.")
    error: float = Field(description="Excess Brier score; of a regression the squared error.")


class SlowChange(Described):
    """Sequential test of the days since the reference, however many checks looked at them."""

    num_days: PositiveInt = Field(description="Days after the reference that were tested.")
    evidence: float
    """Of a change by now: without one at most `num_days`, on average."""
    limit: float = Field(description="Chance reaches it in so many days on average, at the least.")
    began: date | None = Field(description="About when it began; None below the limit.")


class DriftReport(Described):
    """Comparison of a current window with the training reference."""

    reference: TimeWindow
    current: TimeWindow
    num_reference_rows: PositiveInt
    num_current_rows: PositiveInt
    features: tuple[FeatureDrift, ...]
    prediction: FeatureDrift
    reference_performance: Quality | None
    current_performance: Quality | None
    auc_change: Metric | None = Field(description="Current minus reference; None without labels.")
    effect_threshold: float | None = None
    """Lower bound of the effect from which a feature has drifted."""
    excess_brier_change: Metric | None = None
    """`ScoredWindow.excess_brier`, current minus reference."""
    r2_change: Metric | None = None
    """Of a regression, current minus reference."""
    skill_change: Metric | None = None
    """Of `RegressionMetrics.skill`, current minus reference."""
    performance_reference: TimeWindow | None = None
    """Reference of predictions and performance: rows not trained on."""
    days: tuple[DayErrors, ...] = ()
    """Of the current window. Empty in reports before 2026-11-27."""
    slow_change: SlowChange | None = None
    """None where labels or days are too few; None of several classes."""
    result: DriftResult = Field(validation_alias=RESULT)
    evidence: tuple[str, ...]
    compared: tuple[Artifact, ...] = ()
    """Rows and scores of the reference and of the current window. Empty in reports before
    2026-11-23."""


class ServedWindow(Described):
    """Rows of the prediction log, in a form that a drift check compares with its reference."""

    dataset: ValidatedDataset
    """What one version answered: features as they were served, labels where known."""
    reference: ValidatedDataset
    """The reference, with the columns that the log has too."""
    scores: Artifact = Field(description="Parquet: row id, event time, label, score; same rows.")
    program_sha256: str = Field(min_length=64, max_length=64)
    logged: TimeWindow = Field(description="Moments of the requests, by the server's clock.")
    num_labelled: NonNegativeInt
    left_out: tuple[str, ...] = ()
    """Columns of the reference that the log hides or lacks."""
    told: str = Field(description="Where the rows come from, in a sentence.")


class TooFewPredictions(Contract):
    """The log has too little of a window to judge by: no result, and nothing is decided."""

    window: TimeWindow = Field(description="In the use case's time.")
    logged: TimeWindow = Field(description="The same by the server's clock.")
    version: str
    num_rows: NonNegativeInt
    num_days: NonNegativeInt
    reason: str
