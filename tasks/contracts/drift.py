"""Values about how far a window has moved from the training reference."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, PositiveInt

from tasks.contracts.base import Artifact, Contract, TimeWindow
from tasks.contracts.evaluation import Metric, Quality


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


class DriftVerdict(StrEnum):
    """What a drift check advises; whether to act on it is for the caller."""

    STABLE = "stable"
    WATCH = "watch"
    RETRAIN = "retrain"
    DATA_FAULT = "data_fault"


class DriftReport(Contract):
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
    effect_threshold: float | None = Field(
        default=None, description="Lower bound of the effect from which a feature has drifted."
    )
    excess_brier_change: Metric | None = Field(
        default=None, description="`ScoredWindow.excess_brier`, current minus reference."
    )
    r2_change: Metric | None = Field(
        default=None, description="Of a regression, current minus reference."
    )
    skill_change: Metric | None = Field(
        default=None, description="Of `RegressionMetrics.skill`, current minus reference."
    )
    performance_reference: TimeWindow | None = Field(
        default=None, description="Reference of predictions and performance: rows not trained on."
    )
    verdict: DriftVerdict
    evidence: tuple[str, ...]
    compared: tuple[Artifact, ...] = Field(
        default=(),
        description="Rows and scores of the reference and of the current window. Empty in reports "
        "before 2026-11-23.",
    )
