from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.contracts.evaluation import (
    EvaluationReport,
    RegressionComparison,
    SliceMetrics,
    ValueBand,
)
from tasks.registry.config import PromotionConfig
from tasks.registry.gates import REGRESSION_GATES, Evidence, _within, judge
from tests.support.data.builders import edited, metric
from tests.support.registry.evidence import NAN, closed, good
from tests.support.reporting.run_records import number_quality

__all__ = ["good"]  # a fixture
CONFIG = PromotionConfig(min_r2=0.8, max_plausible_r2=0.99, min_skill=0.1, max_bias=0.1)


def comparison(against: str, difference: float) -> RegressionComparison:
    changes = {"r2_difference": metric(difference, 0.001), "rmse_difference": metric(-2.0, 3.0)}
    return RegressionComparison(against=against, **changes)


def regression(report: EvaluationReport) -> EvaluationReport:
    """The report as if the label were a number."""
    return report.model_copy(
        update={
            "overall": number_quality(),
            "baseline_model": number_quality(0.949),
            "baseline": number_quality(0.9, skill=0.0),
            "baseline_name": "last_week",
            "slices": tuple(
                SliceMetrics(
                    column="hour",
                    value=hour,
                    metrics=number_quality(r2),
                    error_ratio=metric(ratio, 0.1),
                )
                for hour, r2, ratio in (("07", 0.7, 1.1), ("03", -9.0, 1.3))
            ),
            "comparisons": (comparison("yardstick", 0.001), comparison("champion:1", 0.002)),
            "roc": (),
            "precision_recall": (),
            "calibration": (),
            "observed": (ValueBand(x=1.0, low=0.0, mean=1.0, high=2.0, num_rows=9),),
        }
    )


@pytest.fixture(name="numbers")
def evidence_of_a_regression(good: Evidence) -> Evidence:
    return replace(good, evaluation=regression(good.evaluation))


def test_a_regression_is_asked_its_own_gates_and_each_says_why(numbers: Evidence) -> None:
    results = judge(numbers, CONFIG)
    assert [gate.name for gate in results] == list(REGRESSION_GATES)
    assert all(gate.passed for gate in results), closed(numbers, CONFIG)
    said = {gate.name: gate.evidence for gate in results}
    assert said["r2-floor"] == "R² 0.9670 [0.9570, 0.9770], floor 0.8000"
    assert said["champion"].startswith("R² minus that of version 1 is +0.0020")
    assert said["baseline"].startswith("skill over the baseline last_week is 0.6500")
    assert "vehicles off on average, 0.008 standard deviations" in said["bias"]
    assert said["worst-slice"] == (
        "worst of 2 slices is hour=03 (4,362 rows): its RMSE is 1.3000 [1.2000, 1.4000] times "
        "that of the better plain prediction there, baseline model or baseline; ceiling 1.5000"
    )


@pytest.mark.parametrize(
    ("path", "value", "gate", "words"),
    [
        ("overall.r2.value", 0.79, "r2-floor", "R² 0.7900"),
        ("overall.r2.value", NAN, "r2-floor", "nan"),
        ("overall.r2.value", 0.991, "leak-suspicion", "leak of the label"),
        ("overall.r2.value", NAN, "leak-suspicion", "nan"),
        ("overall.skill.low", 0.1, "baseline", "has to lie above 0.1000"),
        ("overall.skill.low", NAN, "baseline", "above 0.1000"),
        ("overall.skill", None, "baseline", "is not known"),
        ("overall.bias.value", -201.0, "bias", "ceiling 0.100"),
        ("overall.bias.value", NAN, "bias", "nan"),
        ("overall.label_deviation", 0.0, "bias", "ceiling 0.100"),
        ("comparisons.0.r2_difference.value", -0.0051, "baseline-model", "-0.0051"),
        ("comparisons.1.r2_difference.low", NAN, "champion", "nan"),
        ("comparisons.1.r2_difference.low", float("inf"), "champion", "version 1"),
        ("comparisons", (), "champion", "compares with nothing"),
        ("slices", (), "worst-slice", "no slice"),
        ("slices.0.error_ratio.value", 1.51, "worst-slice", "hour=07"),
        ("slices.0.error_ratio.value", float("inf"), "worst-slice", "hour=07"),
        ("slices.0.error_ratio.value", NAN, "worst-slice", "hour=07"),
        ("slices.1.error_ratio.value", -0.1, "worst-slice", "hour=07"),
        ("slices.1.error_ratio", None, "worst-slice", "not all of the task"),
    ],
)
def test_a_gate_of_a_regression_closes_on_bad_or_missing_judgement(
    numbers: Evidence, path: str, value: object, gate: str, words: str
) -> None:
    report = edited(numbers.evaluation, path, value)
    assert words in closed(replace(numbers, evaluation=report), CONFIG)[gate]


@pytest.mark.parametrize(
    ("path", "value", "gate"),
    [
        ("overall.skill.low", 0.0, "baseline"),
        ("comparisons.0.r2_difference.value", -0.0051, "baseline-model"),
    ],
)
def test_no_plain_prediction_keeps_a_champion_that_surely_errs_more(
    numbers: Evidence, path: str, value: float, gate: str
) -> None:
    report = edited(numbers.evaluation, path, value)
    better = edited(report, "comparisons.1.rmse_difference", metric(-20.0, 5.0))

    assert gate in closed(replace(numbers, evaluation=report), CONFIG)
    assert closed(replace(numbers, evaluation=better), CONFIG) == {}

    alone = replace(numbers, evaluation=better, champion=None)
    infinite = edited(better, "comparisons.1.rmse_difference.low", -float("inf"))
    bad = (NAN, float("inf"), -float("inf"))
    nonsense = (infinite, *(edited(better, path, number) for number in bad))
    low = edited(better, "overall.r2.value", 0.79)
    assert gate in closed(alone, CONFIG)
    assert all(gate in closed(replace(numbers, evaluation=each), CONFIG) for each in nonsense)
    assert "r2-floor" in closed(replace(numbers, evaluation=low), CONFIG)


def test_slices_of_another_task_close_the_gate(numbers: Evidence, good: Evidence) -> None:
    report = numbers.evaluation.model_copy(update={"slices": good.evaluation.slices})
    assert "worst-slice" in closed(replace(numbers, evaluation=report), CONFIG)
    mixed = edited(good.evaluation, "slices.0.metrics", number_quality())
    assert "worst-slice" in closed(replace(good, evaluation=mixed))


@pytest.mark.parametrize("rule", ["not_worse", "better"])
def test_an_r2_may_rise_by_more_than_one_and_a_baseline_need_not_be_named(
    numbers: Evidence, rule: str
) -> None:
    better = (comparison("yardstick", 3.0), comparison("champion:1", 3.0))
    changes = {"comparisons": better, "baseline_name": None}
    report = numbers.evaluation.model_copy(update=changes)
    config = CONFIG.model_copy(update={"champion_rule": rule})
    assert closed(replace(numbers, evaluation=report), config) == {}


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_no_number_opens_the_champion_gate_below_its_margin(low: float) -> None:
    passed = -CONFIG.champion_margin <= low < float("inf")
    assert _within(low, -CONFIG.champion_margin, number_quality()) == passed
