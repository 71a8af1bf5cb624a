"""The rule: from evidence to one action. Pure and total; the first line that applies decides.

| # | evidence | action | cause |
| --- | --- | --- | --- |
| 1 | the drift check found a fault of the data | nothing, and an alert | feed |
| 2 | the drift check found the window stable | nothing | - |
| 3 | the champion was promoted at most `roll_back_within_days` ago, and its whole predecessor
      errs less on the labelled rows of the window, by the 95 % interval | roll back | release |
| 4 | labels show the model stale, and its AUC has for certain not lost more than `max_auc_loss`:
      the ranking is intact, the scores are not | recalibrate | calibration |
| 5 | labels show the model stale | retrain | model |
| 6 | no labels yet, and the predictions drifted for certain | retrain | model |
| 7 | anything less: features or predictions moved, or the window is harder | nothing | - |

So a broken feed never trains a model, and drift that costs nothing moves nothing.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from tasks.contracts.base import Contract
from tasks.contracts.drift import DriftResult
from tasks.contracts.evaluation import Metric
from tasks.control.retraining.config import RetrainingPolicy
from tasks.control.retraining.evidence import Evidence


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


class Choice(Contract):
    """What the rule chose, and by which of its lines."""

    action: Action
    cause: Cause | None = Field(description="None where nothing is broken.")
    rule: int = Field(ge=1, le=7, description="Line of the table.")
    reason: str = Field(description="A sentence with the numbers.")


def decide(evidence: Evidence, config: RetrainingPolicy) -> Choice:
    """Apply the table of this module; every evidence has exactly one line."""
    auc, result = evidence.auc_change, evidence.result
    if result is DriftResult.DATA_FAULT:
        said = evidence.sentences[0] if evidence.sentences else "The drift check names no column."
        return _choice(1, Action.NOTHING, Cause.FEED, f"{said} Mend the feed; nothing is trained")
    if result is DriftResult.STABLE:
        return _choice(2, Action.NOTHING, None, "the window is like the reference")
    if promotion_hurts(evidence, config):
        return _choice(3, Action.ROLL_BACK, Cause.RELEASE, _on_release(evidence))
    if result is DriftResult.RETRAIN and auc is not None and auc.low >= -config.max_auc_loss:
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
    reason = f"{evidence.num_drifted} of {evidence.num_features} features drifted, the model holds"
    if not evidence.performance_known:
        reason = f"{evidence.num_drifted} of {evidence.num_features} features drifted, no labels"
    return _choice(7, Action.NOTHING, None, reason)


def promotion_hurts(evidence: Evidence, config: RetrainingPolicy) -> bool:
    """The latest promotion is recent, and what it replaced would do better in this window."""
    age = evidence.champion_age_days
    return (
        age is not None
        and 0 < config.roll_back_within_days
        and age <= config.roll_back_within_days
        and evidence.former_version is not None
        and evidence.former_is_better
    )


def healed(evidence: Evidence, choice: Choice) -> frozenset[Cause]:
    """Causes whose open incidents this evidence ends.

    Rows without a fault end that of the feed. A stable window ends all, and so does one whose
    labels show that the model holds. Drift without labels ends nothing else: it does not show that
    the model is good again.
    """
    if evidence.result is DriftResult.DATA_FAULT:
        return frozenset()
    if choice.cause is None and (
        evidence.result is DriftResult.STABLE or evidence.performance_known
    ):
        return frozenset(Cause)
    return frozenset({Cause.FEED})


def _choice(rule: int, action: Action, cause: Cause | None, reason: str) -> Choice:
    return Choice(action=action, cause=cause, rule=rule, reason=reason)


def _on_release(evidence: Evidence) -> str:
    difference = evidence.former_difference
    assert difference is not None
    return (
        f"version {evidence.version} was promoted {evidence.champion_age_days:.1f} days ago, and "
        f"version {evidence.former_version} errs less on this window: {difference.error_name} "
        f"{_shown(difference.error)}"
    )


def _on_performance(evidence: Evidence) -> str:
    named = {"AUC": evidence.auc_change, "R²": evidence.r2_change, "skill": evidence.skill_change}
    changes = [f"{name} changed by {_shown(m)}" for name, m in named.items() if m is not None]
    return f"labels show a stale model: {', '.join(changes) or 'it errs more than it promises'}"


def _on_calibration(auc: Metric, config: RetrainingPolicy) -> str:
    return (
        f"labels show scores that promise too much or too little, while the ranking is intact: AUC "
        f"changed by {_shown(auc)}, at most {config.max_auc_loss} lost"
    )


def _shown(metric: Metric) -> str:
    return f"{metric.value:+.4f} [{metric.low:+.4f}, {metric.high:+.4f}]"
