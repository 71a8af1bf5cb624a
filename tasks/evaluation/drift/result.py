"""The result of a drift check, with its reasons in sentences.

Did the model get worse, and is it the model or the window?
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tasks.contracts.drift import DriftResult, FeatureDrift, SlowChange
from tasks.contracts.evaluation import Metric, MetricSet, Quality, RegressionMetrics, ScoredWindow
from tasks.evaluation.config import DriftConfig
from tasks.kernel.values import first_of


@dataclass(frozen=True)
class PerformanceChange:
    """Current minus reference, on rows the model was not trained on.

    Args:
        quality: change of the AUC, or of R2.
        beyond: of a classification, change of the Brier score beyond what the scores themselves
            promise; of a regression, change of the skill over the baseline, None without one.
        is_number: of a regression.
    """

    quality: Metric
    beyond: Metric | None
    is_number: bool = False

    def fell(self, config: DriftConfig) -> bool:
        """AUC fell beyond its interval, or R2 beyond its limit, by the least loss that matters."""
        if self.is_number:
            return control_limit(self.quality) < 0 and -self.quality.value >= config.min_r2_drop
        return self.quality.high < 0 and -self.quality.value >= config.min_auc_drop

    def went_stale(self, config: DriftConfig) -> bool:
        """The model lost what training would bring back.

        A harder month lowers the AUC of a model that is still right: its scores lie closer
        together, and it errs just as much as they say. A stale one errs more than its scores say,
        by far or with a lower AUC. In a harder month the baseline errs more too, on the very same
        rows, and the skill of a regression holds; where the skill alone fell, the baseline may
        have become better and not the model worse. Without a baseline R2 decides.
        """
        if self.beyond is None:
            return self.fell(config)
        if self.is_number:
            return self.lost_skill(config) and self.fell(config)
        grossly = self.beyond.value >= MIN_EXCESS_RISE
        return self.beyond.low > 0 and (grossly or self.fell(config))

    def lost_skill(self, config: DriftConfig) -> bool:
        """A regression fell back to its baseline, beyond the limit."""
        skill, least = self.beyond if self.is_number else None, config.min_skill_drop
        return skill is not None and control_limit(skill) < 0 and -skill.value >= least

    def describe(self, config: DriftConfig) -> str:
        """What it means, with the limits."""
        if self.is_number:
            second = "Skill over the baseline changed by"
            limits = f"{config.min_r2_drop} R², {config.min_skill_drop} skill, 3 standard errors"
            stale, harder = "lost what it knew beyond the baseline", "predict, for the baseline too"
        else:
            second = "Brier score beyond what the scores promise changed by"
            limits = f"{config.min_auc_drop} AUC, {MIN_EXCESS_RISE} Brier"
            stale, harder = "errs more than its scores say", "tell apart, and the scores say so"
        second = f"{second} {self.beyond:+.4f}" if self.beyond else NO_BASELINE
        meaning = "performance holds"
        if self.went_stale(config):
            meaning = f"the model has gone stale: it {stale}"
        elif self.fell(config):
            meaning = f"the window is harder to {harder}: no reason to retrain"
        elif self.lost_skill(config):
            meaning = "R² holds, and the baseline came nearer: no reason to retrain yet"
        return f"{second}. So {meaning} (least changes that count: {limits})."

    def fields(self) -> dict[str, Metric | None]:
        """The changes by field of the report."""
        if self.is_number:
            return {"auc_change": None, "r2_change": self.quality, "skill_change": self.beyond}
        return {"auc_change": self.quality, "excess_brier_change": self.beyond}


def performance_change(reference: ScoredWindow, current: ScoredWindow) -> PerformanceChange | None:
    """Change of performance between two windows; None where one of them has too few labels."""
    before, now = reference.metrics, current.metrics
    if isinstance(before, RegressionMetrics) and isinstance(now, RegressionMetrics):
        skill = None
        if before.skill is not None and now.skill is not None:
            skill = unpaired_difference(now.skill, before.skill)
        return PerformanceChange(unpaired_difference(now.r2, before.r2), skill, is_number=True)
    then, excess = reference.excess_brier, current.excess_brier
    if before is None or now is None or then is None or excess is None:
        return None
    return PerformanceChange(
        unpaired_difference(now.primary, before.primary), unpaired_difference(excess, then)
    )


def control_limit(change: Metric) -> float:
    """Upper end of the 95 % interval of a change, widened to three standard errors.

    A drift check is asked every day, and of so many 95 % intervals some miss in any year; three
    standard errors are what control charts allow for that (Shewhart, 1931, "Economic Control of
    Quality of Manufactured Product"). A regression needs them: R2 and skill fall by the same
    squared errors, so one window of hard days brings both below their intervals. The AUC tells of
    the order of scores and the Brier score of their height, and asking for both is strict enough.
    """
    return change.value + 3 / 1.96 * (change.high - change.value)


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


MAX_NAMED = 5
NO_BASELINE = "There is no baseline to tell a stale model from a harder window"
MIN_EXCESS_RISE = 0.02
"""Rise of the Brier score beyond what the scores promise that is reason enough to retrain."""
LIKE_A_LEAK = (
    " It surely lost more than half of what it told: a feature may have known the label in "
    "training. `falaj models withdraw` takes such a version back"
)


def decide(
    features: Sequence[FeatureDrift],
    prediction: FeatureDrift,
    performance: PerformanceChange | None,
    faults: Sequence[str],
    config: DriftConfig,
    slow: SlowChange | None = None,
    sudden: Collection[str] = (),
) -> DriftResult:
    """What to do, first rule that applies.

    1. A fault of the data: mend the feed. Nothing learned from it would be worth anything.
    2. Labels show that the model has gone stale: retrain, with or without drift that can be seen,
       for the relation of the features to the label may have changed alone.
    3. No labels yet, and the predictions drifted: retrain; the promotion gates still judge.
    4. Something drifted or fell, short of that, or changes slowly or suddenly: watch. Mostly it is
       the season.
    """
    if faults:
        return DriftResult.DATA_FAULT
    if performance is None:
        stale, fell = prediction.drifted, False
    else:
        stale = performance.went_stale(config)
        fell = performance.fell(config) or performance.lost_skill(config)
    if stale:
        return DriftResult.RETRAIN
    crept = slow is not None and slow.began is not None
    drifted = prediction.drifted or any(feature.drifted for feature in features)
    moved = fell or crept or drifted or bool(sudden)
    return DriftResult.WATCH if moved else DriftResult.STABLE


def explain(
    features: Sequence[FeatureDrift],
    prediction: FeatureDrift,
    performance: PerformanceChange | None,
    faults: Sequence[str],
    windows: tuple[ScoredWindow, ScoredWindow],
    config: DriftConfig,
) -> tuple[str, ...]:
    """Sentences with the numbers behind the result, the most serious first.

    Args:
        features: change of each feature.
        prediction: change of the scores.
        performance: change of performance; None without labels.
        faults: signs of a broken feed.
        windows: scores of the performance reference and of the current window.
        config: limits.
    """
    return (
        *(f"Fault of the data: {fault}." for fault in faults),
        _on_performance(performance, windows, config),
        _on_features(features, config),
        f"Predictions, against {windows[0].window}: {prediction.evidence}.",
    )


def _on_performance(
    change: PerformanceChange | None,
    windows: tuple[ScoredWindow, ScoredWindow],
    config: DriftConfig,
) -> str:
    reference, current = windows
    if change is None or reference.metrics is None or current.metrics is None:
        reason = current.unjudged or reference.unjudged or "too few labels"
        return f"Performance is not known: {reason}."
    now, before = current.metrics, reference.metrics
    moved = unpaired_difference(now.primary, before.primary)
    quality = (
        f"{now.primary_name} {now.primary.value:.4f}, against {before.primary.value:.4f} on "
        f"{reference.window}: change {moved:+.4f}"
    )
    leak = LIKE_A_LEAK if change.fell(config) and _lost_most(before, moved) else ""
    return f"{quality}. {change.describe(config)}{leak}"


def _lost_most(before: Quality, moved: Metric) -> bool:
    """A model surely lost more than half of what it told on rows that were there in training."""
    chance = 0.5 if isinstance(before, MetricSet) else 0.0
    return moved.high < -(before.primary.value - chance) / 2


def _on_features(features: Sequence[FeatureDrift], config: DriftConfig) -> str:
    drifted = sorted((f for f in features if f.drifted), key=lambda f: -f.effect_low)
    if not drifted:
        return (
            f"None of {len(features)} features moved by more than {config.min_effect} of its rows "
            "with certainty."
        )
    named = [f"{f.feature} {f.effect:.2f}" for f in drifted]
    return (
        f"{len(drifted)} of {len(features)} features drifted, effect surely above "
        f"{config.min_effect}: {first_of(named, MAX_NAMED, '; ')}."
    )
