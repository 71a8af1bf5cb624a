import numpy as np
import pytest

from tasks.contracts.drift import DriftResult, FeatureDrift
from tasks.contracts.evaluation import Metric, RegressionMetrics, ScoredWindow
from tasks.evaluation.config import DriftConfig
from tasks.evaluation.drift.result import (
    PerformanceChange,
    decide,
    performance_change,
    unpaired_difference,
)
from tests.support.data.builders import feature_drift, metric

CONFIG = DriftConfig(min_auc_drop=0.02, min_r2_drop=0.02, min_skill_drop=0.05)


def feature(name: str = "temp", *, drifted: bool) -> FeatureDrift:
    return feature_drift(name, 0.5, 0.4 if drifted else 0.0, drifted)


def change(auc: float, excess: float, spread: float = 0.01) -> PerformanceChange:
    return PerformanceChange(metric(auc, spread), metric(excess, spread))


@pytest.mark.parametrize(
    ("inputs", "predictions", "performance", "faults", "result"),
    [
        (False, False, change(0.0, 0.0), [], DriftResult.STABLE),
        (True, False, change(0.0, 0.0), [], DriftResult.WATCH),
        (False, True, change(0.0, 0.0), [], DriftResult.WATCH),
        # a harder month: the AUC falls, and the scores say so
        (True, True, change(-0.05, -0.02), [], DriftResult.WATCH),
        # a stale model: the AUC falls, and it errs more than it says
        (True, True, change(-0.05, 0.015), [], DriftResult.RETRAIN),
        # a stale model whose ranking holds
        (True, True, change(0.0, 0.05), [], DriftResult.RETRAIN),
        # the relation to the label changed, and nothing else
        (False, False, change(-0.05, 0.05), [], DriftResult.RETRAIN),
        # within the interval, or too small to matter
        (True, True, change(-0.05, 0.05, spread=0.06), [], DriftResult.WATCH),
        (True, False, change(-0.015, 0.015, spread=0.001), [], DriftResult.WATCH),
        # no labels yet
        (True, False, None, [], DriftResult.WATCH),
        (True, True, None, [], DriftResult.RETRAIN),
        (False, False, None, [], DriftResult.STABLE),
        # a broken feed comes first, whatever else is seen
        (True, True, change(-0.1, 0.1), ["temp: missing"], DriftResult.DATA_FAULT),
        (False, False, None, ["temp: missing"], DriftResult.DATA_FAULT),
    ],
)
def test_the_result_follows_its_rules_in_order(
    inputs: bool,
    predictions: bool,
    performance: PerformanceChange | None,
    faults: list[str],
    result: DriftResult,
) -> None:
    features = [feature("gust", drifted=False), feature(drifted=inputs)]
    prediction = feature("prediction", drifted=predictions)
    assert decide(features, prediction, performance, faults, CONFIG) == result


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


@pytest.mark.parametrize(
    ("r2", "skill", "fell", "stale"),
    [
        (0.0, 0.0, False, False),
        (-0.05, 0.0, True, False),  # a harder month: the baseline errs more too
        (-0.05, -0.2, True, True),
        (0.0, -0.2, False, False),  # the baseline became better, the model no worse
        (0.0, -0.03, False, False),  # too little to matter
        (-0.05, None, True, True),  # nothing tells the month from the model
    ],
)
def test_a_model_is_stale_where_it_loses_against_the_baseline(
    r2: float, skill: float | None, fell: bool, stale: bool
) -> None:
    seen = PerformanceChange(metric(r2), None if skill is None else metric(skill), is_number=True)
    assert (seen.fell(CONFIG), seen.went_stale(CONFIG)) == (fell, stale)


@pytest.mark.parametrize(("standard_errors", "stale"), [(1.9, False), (2.9, False), (3.1, True)])
@pytest.mark.parametrize("wide", ["r2", "skill"])
def test_a_question_of_every_day_needs_three_standard_errors(
    standard_errors: float, stale: bool, wide: str
) -> None:
    spread = {"r2": 0.001, "skill": 0.001, wide: 1.96 * 0.1 / standard_errors}
    changes = (metric(-0.1, spread["r2"]), metric(-0.1, spread["skill"]))
    assert PerformanceChange(*changes, is_number=True).went_stale(CONFIG) == stale


@pytest.mark.parametrize(("skill", "result"), [(-0.2, "watch"), (-0.03, "stable")])
def test_a_skill_that_fell_alone_is_watched(skill: float, result: str) -> None:
    seen = PerformanceChange(metric(0.0), metric(skill), is_number=True)
    assert decide([], feature("prediction", drifted=False), seen, [], CONFIG).value == result
    assert ("the baseline came nearer" in seen.describe(CONFIG)) == (result == "watch")


def test_the_change_is_current_minus_reference() -> None:
    before, now = (
        ScoredWindow.model_construct(
            metrics=RegressionMetrics.model_construct(
                r2=metric(r2, 0.01), skill=metric(skill, 0.02)
            )
        )
        for r2, skill in ((0.95, 0.6), (0.90, 0.4))
    )
    seen = performance_change(before, now)
    assert seen.quality.value == pytest.approx(-0.05)
    assert seen.beyond.value == pytest.approx(-0.2)
