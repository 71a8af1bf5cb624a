"""The rule: from evidence to one action. Pure and total; the first line that applies decides.

| # | evidence | action | cause |
| --- | --- | --- | --- |
| 1 | the drift check found a fault of the data | nothing, and an alert | feed |
| 2 | the drift check found the window stable, and line 7 does not apply | nothing | - |
| 3 | the champion was promoted at most `roll_back_within_days` ago, and its whole predecessor
      errs less on the labelled rows of the window, by the 95 % interval | roll back | release |
| 4 | labels show the model stale, and its AUC has for certain not lost more than `max_auc_loss`:
      the ranking is intact, the scores are not; never of classes | recalibrate | calibration |
| 5 | labels show the model stale | retrain | model |
| 6 | no labels yet, and the predictions drifted for certain | retrain | model |
| 7 | days to train on have grown by `retrain_at_growth` since the champion's | retrain | growth |
| 8 | anything less: features or predictions moved, or the window is harder | nothing | - |

So a broken feed never trains a model, and drift that costs nothing moves nothing. Line 7 needs no
drift: a model's error falls as a power of the rows that it learnt (Hestness and others, "Deep
learning scaling is predictable, empirically", 2017), so each growth by the same factor gains about
the same part of it, and the trainings become rarer as the history grows.
"""

import math
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from pydantic import Field, NonNegativeInt, PositiveInt

from tasks.contracts.base import RESULT, Contract, ModelVersionRef, TimeWindow
from tasks.contracts.drift import DayErrors, DriftReport, DriftResult
from tasks.contracts.evaluation import Comparison, Metric, MetricSet
from tasks.contracts.release import ChampionState
from tasks.control.config import RetrainingPolicy
from tasks.kernel.values import Described

MAX_NAMED = 5
DAY = timedelta(days=1)


class Evidence(Described):
    """Everything that the rule looks at; the whole of it is kept with the decision."""

    result: DriftResult = Field(validation_alias=RESULT, description="Of the drift check.")
    window: TimeWindow = Field(description="Window that was checked.")
    version: PositiveInt = Field(description="Model version that was judged.")
    num_features: NonNegativeInt
    num_drifted: NonNegativeInt
    drifted: tuple[str, ...] = Field(description="Features that moved most.")
    prediction_drifted: bool
    prediction_effect_low: float = Field(allow_inf_nan=False)
    """Lower bound of the scores' effect, 0 to 1."""
    num_labelled: NonNegativeInt = Field(description="Rows of the window with a label.")
    auc_change: Metric | None = None
    """Of a classification; None where labels are too few."""
    excess_brier_change: Metric | None = None
    r2_change: Metric | None = Field(default=None, description="Of a regression.")
    skill_change: Metric | None = None
    champion_age_days: float | None
    """Since its promotion until the check; None where it is not known, or the version became
    champion by a roll back."""
    former_version: PositiveInt | None
    """Champion before this one, with all its files; None where there is none."""
    former_difference: Comparison | None
    """Former minus present champion on the labelled rows of the window."""
    can_be_mapped: bool = True
    """Whether a map of the scores exists; none of several classes."""
    train_growth: float | None = None
    """Days that a retraining would learn from, to those of the champion."""
    train_days: float | None = Field(default=None, description="Those of a retraining.")
    days: tuple[DayErrors, ...] = ()
    """Of the window; later checks test them together with their own."""
    sentences: tuple[str, ...] = Field(description="The drift check's own reasons.")

    @property
    def performance_known(self) -> bool:
        """True where labels say how good the model was in the window."""
        changes = (self.auc_change, self.excess_brier_change, self.r2_change, self.skill_change)
        return any(change is not None for change in changes)


class Action(StrEnum):
    """What the controller may do."""

    NOTHING = "nothing"
    RECALIBRATE = "recalibrate"
    RETRAIN = "retrain"
    ROLL_BACK = "roll_back"


class Cause(StrEnum):
    """What is broken; an incident is of one cause."""

    FEED = "feed"
    RELEASE = "release"
    CALIBRATION = "calibration"
    MODEL = "model"
    GROWTH = "growth"


class Choice(Contract):
    """What the rule chose, and by which of its lines."""

    action: Action
    cause: Cause | None = Field(description="None where nothing is broken.")
    rule: int = Field(ge=1, le=8, description="Line of the table.")
    reason: str = Field(description="A sentence with the numbers.")


def decide(evidence: Evidence, config: RetrainingPolicy) -> Choice:
    """Apply the table of this module; every evidence has exactly one line."""
    auc, result = evidence.auc_change, evidence.result
    if result is DriftResult.DATA_FAULT:
        said = evidence.sentences[0] if evidence.sentences else "The drift check names no column."
        return _choice(1, Action.NOTHING, Cause.FEED, f"{said} Mend the feed; nothing is trained")
    grown = _has_grown(evidence, config)
    if result is DriftResult.STABLE and not grown:
        return _choice(2, Action.NOTHING, None, "the window is like the reference")
    if result is not DriftResult.STABLE and promotion_hurts(evidence, config):
        return _choice(3, Action.ROLL_BACK, Cause.RELEASE, _on_release(evidence))
    ranks_hold = auc is not None and auc.low >= -config.max_auc_loss
    if result is DriftResult.RETRAIN and auc is not None and ranks_hold and evidence.can_be_mapped:
        return _choice(4, Action.RECALIBRATE, Cause.CALIBRATION, _on_calibration(auc, config))
    if result is DriftResult.RETRAIN and evidence.performance_known:
        return _choice(5, Action.RETRAIN, Cause.MODEL, _on_performance(evidence))
    if result is DriftResult.RETRAIN:
        reason = (
            "no labels yet, and the predictions moved by surely "
            f"{evidence.prediction_effect_low:.2f} with {evidence.num_drifted} of "
            f"{evidence.num_features} features"
        )
        return _choice(6, Action.RETRAIN, Cause.MODEL, reason)
    if grown:
        reason = (
            f"the days to train on have grown by a factor of {evidence.train_growth:.2f} since the "
            f"champion's, at least {config.retrain_at_growth}"
        )
        return _choice(7, Action.RETRAIN, Cause.GROWTH, reason)
    reason = f"{evidence.num_drifted} of {evidence.num_features} features drifted, the model holds"
    if not evidence.performance_known:
        reason = f"{evidence.num_drifted} of {evidence.num_features} features drifted, no labels"
    return _choice(8, Action.NOTHING, None, reason)


def _has_grown(evidence: Evidence, config: RetrainingPolicy) -> bool:
    limit, growth = config.retrain_at_growth, evidence.train_growth
    return limit is not None and growth is not None and growth >= limit


def promotion_hurts(evidence: Evidence, config: RetrainingPolicy) -> bool:
    """The latest promotion is recent, and what it replaced errs less in this window.

    By the whole 95 % interval.
    """
    age, difference = evidence.champion_age_days, evidence.former_difference
    return (
        age is not None
        and 0 < config.roll_back_within_days
        and age <= config.roll_back_within_days
        and evidence.former_version is not None
        and difference is not None
        and difference.error.high < 0
    )


def healed(evidence: Evidence, choice: Choice) -> frozenset[Cause]:
    """Causes whose open incidents this evidence ends.

    Rows without a fault end that of the feed. A stable window ends all but days that have grown,
    and so does one whose labels show that the model holds. Drift without labels ends nothing else:
    it does not show that the model is good again.
    """
    if evidence.result is DriftResult.DATA_FAULT:
        return frozenset()
    holds = choice.cause in (None, Cause.GROWTH)
    if holds and (evidence.result is DriftResult.STABLE or evidence.performance_known):
        return frozenset(cause for cause in Cause if cause is not choice.cause)
    return frozenset({Cause.FEED})


def _choice(rule: int, action: Action, cause: Cause | None, reason: str) -> Choice:
    return Choice(action=action, cause=cause, rule=rule, reason=reason)


def _on_release(evidence: Evidence) -> str:
    difference = evidence.former_difference
    assert difference is not None
    return (
        f"version {evidence.version} was promoted {evidence.champion_age_days:.1f} days ago, and "
        f"version {evidence.former_version} errs less on this window: {difference.error_name} "
        f"{difference.error:+.4f}"
    )


def _on_performance(evidence: Evidence) -> str:
    named = {
        "Brier score beyond what the scores promise": evidence.excess_brier_change,
        "AUC": evidence.auc_change,
        "R²": evidence.r2_change,
        "skill": evidence.skill_change,
    }
    changes = [f"{name} changed by {m:+.4f}" for name, m in named.items() if m is not None]
    return f"labels show a stale model: {', '.join(changes) or 'it errs more than it promises'}"


def _on_calibration(auc: Metric, config: RetrainingPolicy) -> str:
    return (
        f"labels show scores that promise too much or too little, while the ranking is intact: AUC "
        f"changed by {auc:+.4f}, at most {config.max_auc_loss} lost"
    )


def gather(
    report: DriftReport,
    version: ModelVersionRef,
    champion: ChampionState | None,
    former_difference: Comparison | None,
    checked_at: datetime,
    held_back: timedelta,
) -> Evidence:
    """The evidence of one drift check.

    Args:
        report: the check's outcome.
        version: the version whose scores it judged.
        champion: as it is now; None before there is one.
        former_difference: former minus present champion; None where it was not measured.
        checked_at: when the check ended.
        held_back: newest days that a retraining does not learn from.
    """
    moved = sorted((f for f in report.features if f.drifted), key=lambda f: -f.effect_low)
    labelled, effect = report.current_performance, report.prediction.effect_low
    champion = champion if champion is not None and champion.version == version else None
    promoted = champion.promoted_at if champion else None
    former = champion.previous if champion and not champion.previous_trouble else None
    learnt = report.reference.end - report.reference.start
    to_learn = report.current.end - held_back - report.reference.start
    is_known = former_difference is not None and _known(former_difference.error) is not None
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
        champion_age_days=max(0.0, (checked_at - promoted) / DAY) if promoted else None,
        former_version=former.version if former else None,
        former_difference=former_difference if is_known else None,
        train_growth=to_learn / learnt,
        train_days=to_learn / DAY,
        can_be_mapped=not (isinstance(labelled, MetricSet) and labelled.by_class),
        days=report.days,
        sentences=report.evidence,
    )


def asks_for_former(
    report: DriftReport,
    champion: ChampionState,
    config: RetrainingPolicy,
    checked_at: datetime | None = None,
) -> bool:
    """True where it matters how the former champion would do: after a promotion, with labels."""
    checked_at = checked_at or datetime.now(UTC)
    return (
        champion.previous_trouble is None
        and champion.promoted_at is not None
        and checked_at - champion.promoted_at <= config.roll_back_within_days * DAY
        and report.current_performance is not None
        and report.result in (DriftResult.WATCH, DriftResult.RETRAIN)
    )


def _known(metric: Metric | None) -> Metric | None:
    """The metric, or None where one of its numbers could not be computed."""
    if metric is None or not all(map(math.isfinite, (metric.value, metric.low, metric.high))):
        return None
    return metric
