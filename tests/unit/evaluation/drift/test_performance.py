from __future__ import annotations

import numpy as np
import pytest

from tasks.contracts.drift import DriftVerdict, FeatureDrift
from tasks.contracts.evaluation import Metric
from tasks.evaluation.drift.config import DriftConfig
from tasks.evaluation.drift.performance import (
    ClassificationChange,
    PerformanceChange,
    unpaired_difference,
)
from tasks.evaluation.drift.verdict import decide

CONFIG = DriftConfig(min_auc_drop=0.02, min_excess_rise=0.02)


def feature(name: str = "temp", *, drifted: bool) -> FeatureDrift:
    return FeatureDrift(
        feature=name,
        kind="numeric",
        psi=1.0,
        psi_noise=0.01,
        effect=0.5,
        effect_low=0.4 if drifted else 0.0,
        missing_reference=0.0,
        missing_current=0.0,
        drifted=drifted,
        evidence="",
    )


def change(auc: float, excess: float, spread: float = 0.01) -> PerformanceChange:
    auc_change, excess_change = (
        Metric(value=value, low=value - spread, high=value + spread) for value in (auc, excess)
    )
    return ClassificationChange(auc_change, excess_change)


@pytest.mark.parametrize(
    ("inputs", "predictions", "performance", "faults", "verdict"),
    [
        (False, False, change(0.0, 0.0), [], DriftVerdict.STABLE),
        (True, False, change(0.0, 0.0), [], DriftVerdict.WATCH),
        (False, True, change(0.0, 0.0), [], DriftVerdict.WATCH),
        # a harder month: the AUC falls, and the scores say so
        (True, True, change(-0.05, -0.02), [], DriftVerdict.WATCH),
        # a stale model: the AUC falls, and it errs more than it says
        (True, True, change(-0.05, 0.015), [], DriftVerdict.RETRAIN),
        # a stale model whose ranking holds
        (True, True, change(0.0, 0.05), [], DriftVerdict.RETRAIN),
        # the relation to the label changed, and nothing else
        (False, False, change(-0.05, 0.05), [], DriftVerdict.RETRAIN),
        # within the interval, or too small to matter
        (True, True, change(-0.05, 0.05, spread=0.06), [], DriftVerdict.WATCH),
        (True, False, change(-0.015, 0.015, spread=0.001), [], DriftVerdict.WATCH),
        # no labels yet
        (True, False, None, [], DriftVerdict.WATCH),
        (True, True, None, [], DriftVerdict.RETRAIN),
        (False, False, None, [], DriftVerdict.STABLE),
        # a broken feed comes first, whatever else is seen
        (True, True, change(-0.1, 0.1), ["temp: missing"], DriftVerdict.DATA_FAULT),
        (False, False, None, ["temp: missing"], DriftVerdict.DATA_FAULT),
    ],
)
def test_the_verdict_follows_its_rules_in_order(
    inputs: bool,
    predictions: bool,
    performance: PerformanceChange | None,
    faults: list[str],
    verdict: DriftVerdict,
) -> None:
    features = [feature("gust", drifted=False), feature(drifted=inputs)]
    prediction = feature("prediction", drifted=predictions)
    assert decide(features, prediction, performance, faults, CONFIG) == verdict


def test_the_interval_of_a_difference_is_that_of_two_independent_estimates() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.normal(0.7, 0.02, 400_000), rng.normal(0.75, 0.01, 400_000)
    metrics = [
        Metric(value=v.mean(), low=np.quantile(v, 0.025), high=np.quantile(v, 0.975))
        for v in (one, other)
    ]
    difference = unpaired_difference(*metrics)
    low, high = np.quantile(one - other, [0.025, 0.975])
    assert difference.value == pytest.approx(-0.05, abs=1e-3)
    assert difference.low == pytest.approx(low, abs=1e-3)
    assert difference.high == pytest.approx(high, abs=1e-3)


def test_a_lopsided_interval_stays_lopsided() -> None:
    one, other = Metric(value=0.7, low=0.6, high=0.72), Metric(value=0.7, low=0.7, high=0.7)
    difference = unpaired_difference(one, other)
    assert (difference.low, difference.high) == (pytest.approx(-0.1), pytest.approx(0.02))
