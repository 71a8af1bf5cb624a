"""What a decision is made from: the drift report in short, and how the champion stands."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

from pydantic import Field, NonNegativeInt, PositiveInt

from tasks.contracts.base import RESULT, Contract, ModelVersionRef, TimeWindow
from tasks.contracts.drift import DriftReport, DriftResult
from tasks.contracts.evaluation import Comparison, Metric
from tasks.contracts.release import ChampionState
from tasks.control.retraining.config import RetrainingPolicy

MAX_NAMED = 5
SECONDS_PER_DAY = 86_400


class Evidence(Contract):
    """Everything that the rule looks at; the whole of it is kept with the decision."""

    result: DriftResult = Field(validation_alias=RESULT, description="Of the drift check.")
    window: TimeWindow = Field(description="Window that was checked.")
    version: PositiveInt = Field(description="Model version that was judged.")
    num_features: NonNegativeInt
    num_drifted: NonNegativeInt
    drifted: tuple[str, ...] = Field(description="Features that moved most.")
    prediction_drifted: bool
    prediction_effect_low: float = Field(
        allow_inf_nan=False, description="Lower bound of the scores' effect, 0 to 1."
    )
    num_labelled: NonNegativeInt = Field(description="Rows of the window with a label.")
    auc_change: Metric | None = Field(
        default=None, description="Of a classification; None where labels are too few."
    )
    excess_brier_change: Metric | None = None
    r2_change: Metric | None = Field(default=None, description="Of a regression.")
    skill_change: Metric | None = None
    champion_age_days: float | None = Field(
        description="Since its promotion until the check; None where it is not known, or the "
        "version became champion by a roll back."
    )
    former_version: PositiveInt | None = Field(
        description="Champion before this one, with all its files; None where there is none."
    )
    former_difference: Comparison | None = Field(
        description="Former minus present champion on the labelled rows of the window."
    )
    sentences: tuple[str, ...] = Field(description="The drift check's own reasons.")

    @property
    def performance_known(self) -> bool:
        """True where labels say how good the model was in the window."""
        changes = (self.auc_change, self.excess_brier_change, self.r2_change, self.skill_change)
        return any(change is not None for change in changes)

    @property
    def former_is_better(self) -> bool:
        """The former champion errs less on the window, by the whole 95 % interval."""
        difference = self.former_difference
        return difference is not None and difference.error.high < 0


def gather(
    report: DriftReport,
    version: ModelVersionRef,
    standing: ChampionState | None,
    former_difference: Comparison | None,
    checked_at: datetime,
) -> Evidence:
    """The evidence of one drift check.

    Args:
        report: the check's outcome.
        version: the version whose scores it judged.
        standing: the champion's standing; None before there is a champion.
        former_difference: former minus present champion; None where it was not measured.
        checked_at: when the check ended.
    """
    moved = sorted((f for f in report.features if f.drifted), key=lambda f: -f.effect_low)
    labelled, effect = report.current_performance, report.prediction.effect_low
    return Evidence(
        result=report.result,
        window=report.current,
        version=version.version,
        num_features=len(report.features),
        num_drifted=len(moved),
        drifted=tuple(f.feature for f in moved[:MAX_NAMED]),
        prediction_drifted=report.prediction.drifted,
        prediction_effect_low=effect if math.isfinite(effect) else 0.0,
        num_labelled=labelled.num_rows if labelled else 0,
        auc_change=_known(report.auc_change),
        excess_brier_change=_known(report.excess_brier_change),
        r2_change=_known(report.r2_change),
        skill_change=_known(report.skill_change),
        champion_age_days=_age_days(standing, version, checked_at),
        former_version=_whole_former(standing, version),
        former_difference=former_difference if _is_whole(former_difference) else None,
        sentences=report.evidence,
    )


def asks_for_former(report: DriftReport, standing: ChampionState, config: RetrainingPolicy) -> bool:
    """True where it matters how the former champion would do: after a promotion, with labels."""
    return (
        standing.previous_trouble is None
        and standing.promoted_at is not None
        and datetime.now(UTC) - standing.promoted_at <= timedelta(days=config.roll_back_within_days)
        and report.current_performance is not None
        and report.result in (DriftResult.WATCH, DriftResult.RETRAIN)
    )


def _is_whole(comparison: Comparison | None) -> bool:
    return comparison is not None and _known(comparison.error) is not None


def _known(metric: Metric | None) -> Metric | None:
    """The metric, or None where one of its numbers could not be computed."""
    if metric is None or not all(map(math.isfinite, (metric.value, metric.low, metric.high))):
        return None
    return metric


def _age_days(
    standing: ChampionState | None, version: ModelVersionRef, checked_at: datetime
) -> float | None:
    if standing is None or standing.promoted_at is None or standing.version != version:
        return None
    return max(0.0, (checked_at - standing.promoted_at).total_seconds() / SECONDS_PER_DAY)


def _whole_former(standing: ChampionState | None, version: ModelVersionRef) -> int | None:
    if standing is None or standing.previous is None or standing.version != version:
        return None
    return None if standing.previous_trouble else standing.previous.version
