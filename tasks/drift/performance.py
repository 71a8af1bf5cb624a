"""Did the model get worse, and is it the model or the window?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tasks.contracts import Metric, ScoredWindow
from tasks.drift.config import DriftConfig


@dataclass(frozen=True)
class PerformanceChange:
    """Current minus reference, on rows the model was not trained on.

    Args:
        auc: change of the AUC.
        excess_brier: change of the Brier score beyond what the scores themselves promise.
    """

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


def performance_change(reference: ScoredWindow, current: ScoredWindow) -> PerformanceChange | None:
    """Change of performance between two windows; None where one of them has too few labels."""
    if (
        reference.metrics is None
        or current.metrics is None
        or reference.excess_brier is None
        or current.excess_brier is None
    ):
        return None
    return PerformanceChange(
        auc=unpaired_difference(current.metrics.auc, reference.metrics.auc),
        excess_brier=unpaired_difference(current.excess_brier, reference.excess_brier),
    )


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
