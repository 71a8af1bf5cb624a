"""The verdict of a drift check, with its reasons in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.contracts.drift import DriftVerdict, FeatureDrift
from tasks.contracts.evaluation import Metric, MetricSet, Quality, ScoredWindow
from tasks.evaluation.drift.config import DriftConfig
from tasks.evaluation.drift.performance import PerformanceChange, signed, unpaired_difference

MAX_NAMED = 5
LIKE_A_LEAK = (
    " It surely lost more than half of what it told: a feature may have known the label in "
    "training. `python -m falaj models withdraw` takes such a version back"
)


def decide(
    features: Sequence[FeatureDrift],
    prediction: FeatureDrift,
    performance: PerformanceChange | None,
    faults: Sequence[str],
    config: DriftConfig,
) -> DriftVerdict:
    """What to do, first rule that applies.

    1. A fault of the data: mend the feed. Nothing learned from it would be worth anything.
    2. Labels show that the model has gone stale: retrain, with or without drift that can be seen,
       for the relation of the features to the label may have changed alone.
    3. No labels yet, and the predictions drifted: retrain; the promotion gates still judge.
    4. Something drifted or fell, short of that: watch. Mostly it is the season.
    """
    if faults:
        return DriftVerdict.DATA_FAULT
    if performance is None:
        stale, fell = prediction.drifted, False
    else:
        stale, fell = performance.went_stale(config), performance.fell(config)
    if stale:
        return DriftVerdict.RETRAIN
    moved = fell or prediction.drifted or any(feature.drifted for feature in features)
    return DriftVerdict.WATCH if moved else DriftVerdict.STABLE


def explain(
    features: Sequence[FeatureDrift],
    prediction: FeatureDrift,
    performance: PerformanceChange | None,
    faults: Sequence[str],
    windows: tuple[ScoredWindow, ScoredWindow],
    config: DriftConfig,
) -> tuple[str, ...]:
    """Sentences with the numbers behind the verdict, the most serious first.

    Args:
        features: change of each feature.
        prediction: change of the scores.
        performance: change of performance; None without labels.
        faults: signs of a broken feed.
        windows: scores of the performance reference and of the current window.
        config: limits.
    """
    sentences = [f"Fault of the data: {fault}." for fault in faults]
    sentences.append(_on_performance(performance, windows, config))
    sentences.append(_on_features(features, config))
    sentences.append(f"Predictions, against {windows[0].window}: {prediction.evidence}.")
    return tuple(sentences)


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
        f"{reference.window}: change {signed(moved)}"
    )
    second, limits = change.describe(config)
    if change.went_stale(config):
        meaning = change.STALE
    elif change.fell(config):
        meaning = change.HARDER
    else:
        meaning = "performance holds"
    leak = LIKE_A_LEAK if change.fell(config) and _lost_most(before, moved) else ""
    return f"{quality}. {second}. So {meaning} (least changes that count: {limits}).{leak}"


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
    named = "; ".join(f"{f.feature} {f.effect:.2f}" for f in drifted[:MAX_NAMED])
    rest = len(drifted) - MAX_NAMED
    more = f"; and {rest} more" if rest > 0 else ""
    return (
        f"{len(drifted)} of {len(features)} features drifted, effect surely above "
        f"{config.min_effect}: {named}{more}."
    )
