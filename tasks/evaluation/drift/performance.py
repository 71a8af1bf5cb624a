"""Did the model get worse, and is it the model or the window?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from tasks.contracts.evaluation import Metric, MetricSet, RegressionMetrics, ScoredWindow
from tasks.evaluation.drift.config import DriftConfig


@dataclass(frozen=True)
class ClassificationChange:
    """Change of a model that gives probabilities.

    Args:
        auc: change of the AUC.
        excess_brier: change of the Brier score beyond what the scores themselves promise.
    """

    STALE: ClassVar = "the model has gone stale: it errs more than its scores say"
    HARDER: ClassVar = (
        "the window is harder to tell apart, and the scores say so: no reason to retrain"
    )

    auc: Metric
    excess_brier: Metric

    def fell(self, config: DriftConfig) -> bool:
        """AUC fell beyond its interval and the least loss that matters."""
        return self.auc.high < 0 and -self.auc.value >= config.min_auc_drop

    def went_stale(self, config: DriftConfig) -> bool:
        """The model errs more than its own scores promise, by far or with a lower AUC.

        A harder month lowers the AUC of a model that is still right: its scores lie closer
        together, and it errs just as much as they say. A model that has gone stale errs more than
        its scores say, beyond what it did on the reference. Only that is mended by training.
        """
        grossly = self.excess_brier.value >= config.min_excess_rise
        return self.excess_brier.low > 0 and (grossly or self.fell(config))

    def describe(self, config: DriftConfig) -> tuple[str, str]:
        """Excess Brier, and the limits."""
        return (
            f"Brier score beyond what the scores promise changed by {signed(self.excess_brier)}",
            f"{config.min_auc_drop} AUC, {config.min_excess_rise} Brier",
        )


@dataclass(frozen=True)
class RegressionChange:
    """Change of a model that gives numbers.

    Args:
        r2: change of R2.
        skill: change of the skill over the baseline; None where no baseline is known.
    """

    STALE: ClassVar = "the model has gone stale: it lost what it knew beyond the baseline"
    HARDER: ClassVar = "the window is harder to predict, for the baseline too: no reason to retrain"

    r2: Metric
    skill: Metric | None

    def fell(self, config: DriftConfig) -> bool:
        """R2 fell beyond its interval and the least loss that matters."""
        return self.r2.high < 0 and -self.r2.value >= config.min_r2_drop

    def went_stale(self, config: DriftConfig) -> bool:
        """The skill over the baseline fell; without a baseline, R2 did.

        In a harder month the baseline errs more too, on the very same rows, and the skill holds.
        """
        if self.skill is None:
            return self.fell(config)
        return self.skill.high < 0 and -self.skill.value >= config.min_skill_drop

    def describe(self, config: DriftConfig) -> tuple[str, str]:
        """Skill, and the limits."""
        skill = "There is no baseline to tell a stale model from a harder window"
        if self.skill is not None:
            skill = f"Skill over the baseline changed by {signed(self.skill)}"
        return skill, f"{config.min_r2_drop} R², {config.min_skill_drop} skill"


PerformanceChange = ClassificationChange | RegressionChange
"""Current minus reference, on rows the model was not trained on."""


def performance_change(reference: ScoredWindow, current: ScoredWindow) -> PerformanceChange | None:
    """Change of performance between two windows; None where one of them has too few labels."""
    before, now = reference.metrics, current.metrics
    if isinstance(before, RegressionMetrics) and isinstance(now, RegressionMetrics):
        skill = None
        if before.skill is not None and now.skill is not None:
            skill = unpaired_difference(now.skill, before.skill)
        return RegressionChange(r2=unpaired_difference(now.r2, before.r2), skill=skill)
    if (
        not isinstance(before, MetricSet)
        or not isinstance(now, MetricSet)
        or reference.excess_brier is None
        or current.excess_brier is None
    ):
        return None
    return ClassificationChange(
        auc=unpaired_difference(now.auc, before.auc),
        excess_brier=unpaired_difference(current.excess_brier, reference.excess_brier),
    )


def signed(metric: Metric) -> str:
    """A change with its interval."""
    return f"{metric.value:+.4f} [{metric.low:+.4f}, {metric.high:+.4f}]"


def unpaired_difference(one: Metric, other: Metric) -> Metric:
    """`one` minus `other`, of different rows, with its interval from the two intervals.

    The method of variance estimates recovery (Zou and Donner, 2008, "Construction of confidence
    limits about effect measures"): each side's distance to its limit adds up in squares.
    """
    value = one.value - other.value
    return Metric(
        value=value,
        low=value - math.hypot(one.value - one.low, other.high - other.value),
        high=value + math.hypot(one.high - one.value, other.value - other.low),
    )
