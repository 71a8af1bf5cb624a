from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.contracts.base import ModelVersionRef
from tasks.contracts.evaluation import (
    Calibration,
    Calibrator,
    EvaluationReport,
    MapFit,
    Metric,
    SingleFeature,
)
from tasks.contracts.release import GateResult
from tasks.registry.config import PromotionConfig
from tasks.registry.gates import GATES, Evidence, judge
from tests.support.data import builders as shared
from tests.support.data.builders import edited, metric
from tests.support.registry.evidence import CONFIG, NAN, OTHER, closed, good

__all__ = ["good"]  # fixtures

CHAMPION_COMPARISON = 1


def with_evaluation(good: Evidence, path: str, new: object) -> Evidence:
    return replace(good, evaluation=edited(good.evaluation, path, new))


def test_all_gates_open_on_good_evidence_and_each_says_why(good: Evidence) -> None:
    results = judge(good, CONFIG)

    assert [gate.name for gate in results] == list(GATES)
    assert all(gate.passed for gate in results), closed(good)
    *of_digests, window, floor, leak, yardstick, champion, calibration, part, hardware, age = (
        gate.evidence for gate in results
    )
    assert all(len(sentence) > 15 for sentence in of_digests)
    assert window.endswith("trained and chosen on rows up to 2013-09-01T00:00Z")
    assert floor == "AUC 0.7500 [0.7400, 0.7600], floor 0.6000"
    assert leak.endswith(", of the baseline model 0.7490, plausible up to 0.9500: plausible")
    assert yardstick == (
        "AUC minus that of gradient boosting (0.7490) is +0.0010 [+0.0000, +0.0020], allowed "
        "from -0.0050"
    )
    assert champion == (
        "AUC minus that of version 1 is +0.0020 [+0.0010, +0.0030] on the same rows; rule "
        "'not_worse' wants the lower bound at or above -0.0050"
    )
    assert calibration == "calibration error 0.0100 [0.0080, 0.0120], ceiling 0.0500"
    assert part.startswith("worst of 2 slices is carrier=EV (4,000 rows) with AUC 0.7000 [0.6900")
    assert hardware == "kept variants: cpu: onnx-fp32"
    assert age == "the test window ended 2014-01-01; no age limit is set"


@pytest.mark.parametrize(
    ("path", "value", "gate", "words"),
    [
        ("overall.auc.value", 0.59, "auc-floor", "AUC 0.5900"),
        ("overall.auc.value", 0.96, "leak-suspicion", "leak of the label"),
        ("comparisons.0.auc_difference.value", -0.0051, "baseline-model", "-0.0051"),
        ("comparisons", (), "baseline-model", "not exactly one"),
        ("comparisons.0.against", "champion:1", "baseline-model", "not exactly one"),
        ("comparisons.1.against", "yardstick", "baseline-model", "not exactly one"),
        ("comparisons.1.auc_difference.low", -0.0051, "champion", "version 1"),
        ("comparisons", (), "champion", "compares with nothing"),
        ("comparisons.1.against", "champion:7", "champion", "yardstick, champion:7"),
        ("comparisons.1.against", "champion:10", "champion", "present champion"),
        ("overall.calibration_error.value", 0.0501, "calibration", "0.0501"),
        ("slices", (), "worst-slice", "no slice"),
        ("slices.1.metrics.auc.value", 0.54, "worst-slice", "carrier=EV"),
        ("slices.0.metrics.auc.value", NAN, "worst-slice", "carrier=AA"),
        ("slices.1.metrics.auc.value", NAN, "worst-slice", "carrier=EV"),
        ("model_sha256", OTHER, "same-digests", "evaluation's program is ffffffffffff"),
        ("snapshot_sha256", OTHER, "same-digests", "evaluation's snapshot is ffffffffffff"),
        ("window", shared.month(8, 4), "later-test-window", "2013-08-01"),
    ],
)
def test_a_gate_closes_on_bad_or_missing_judgement(
    good: Evidence, path: str, value: object, gate: str, words: str
) -> None:
    refused = closed(with_evaluation(good, path, value))

    assert words in refused[gate]


@pytest.mark.parametrize(
    ("field", "path", "words"),
    [
        ("candidate", "program_sha256", "registry's program"),
        ("candidate", "snapshot_sha256", "dataset's snapshot"),
        ("dataset", "snapshot.data.sha256", "dataset's snapshot is ffffffffffff"),
        ("dataset", "validation.subject_sha256", "validated snapshot is ffffffffffff"),
    ],
)
def test_any_broken_link_of_the_chain_of_digests_closes_its_gate(
    good: Evidence, field: str, path: str, words: str
) -> None:
    broken = replace(good, **{field: edited(getattr(good, field), path, OTHER)})

    assert words in closed(broken)["same-digests"]


def test_a_variant_of_another_program_closes_the_gate(good: Evidence) -> None:
    alien = edited(good.variants[0], "source_sha256", OTHER)

    refused = closed(replace(good, variants=(alien, good.variants[1])))

    assert "source of onnx-fp32" in refused["same-digests"]
    assert "not those that were presented" in refused["whole-artifacts"]


@pytest.mark.parametrize(
    ("change", "gates"),
    [
        ({"damage": ("program.pt2 is missing",)}, {"whole-artifacts"}),
        ({"manifest": None}, {"whole-artifacts", "later-test-window"}),
        ({"variants": None}, {"whole-artifacts", "hardware"}),
    ],
)
def test_a_registry_that_lacks_something_closes_its_gates(
    good: Evidence, change: dict[str, Any], gates: set[str]
) -> None:
    assert closed(replace(good, record=replace(good.record, **change))).keys() == gates


def test_every_required_hardware_class_needs_its_own_variant(good: Evidence) -> None:
    config = PromotionConfig(required_hardware=("cpu", "gpu"))

    assert closed(good, config) == {"hardware": "no kept variant for gpu"}
    assert closed(good, PromotionConfig(required_hardware=())) == {}
    for path, value in (("variant.accepted", False), ("folder", None)):
        listed = edited(good.record.variants, f"variants.0.{path}", value)
        lost = replace(good, record=replace(good.record, variants=listed))
        assert closed(lost)["hardware"] == "no kept variant for cpu"


def test_without_a_champion_no_comparison_is_needed(good: Evidence) -> None:
    first = replace(with_evaluation(good, "comparisons.1.against", "champion:9"), champion=None)

    assert closed(first) == {}


def test_the_champion_itself_passes_its_gate_and_the_evidence_says_so(good: Evidence) -> None:
    itself = replace(good, champion=good.candidate)
    same_program = replace(good, champion=edited(good.candidate, "version", 5))

    for evidence, words in ((itself, "is the champion already"), (same_program, "same program")):
        gate = next(g for g in judge(evidence, CONFIG) if g.name == "champion")
        assert gate.passed
        assert words in gate.evidence


def test_by_the_stricter_rule_a_candidate_is_surely_better(good: Evidence) -> None:
    better = PromotionConfig(champion_rule="better")
    for low, is_open in ((0.0001, True), (0.0, False)):
        evidence = with_evaluation(good, "comparisons.1.auc_difference.low", low)
        assert ("champion" not in closed(evidence, better)) is is_open


@pytest.mark.parametrize(("days", "is_open"), [(-1, False), (0, True), (30, True), (31, False)])
def test_a_judgement_is_fresh_within_its_age_and_never_from_the_future(
    good: Evidence, days: int, is_open: bool
) -> None:
    now = good.evaluation.window.end + timedelta(days=days)
    evidence = replace(good, now=now)

    refused = closed(evidence, PromotionConfig(max_age_days=30))

    assert ("freshness" not in refused) is is_open
    assert closed(evidence) == {}


numbers = st.floats(allow_nan=True, allow_infinity=True)


def judged(good: Evidence, auc: float, error: float, yardstick: float, low: float) -> Evidence:
    report: EvaluationReport = good.evaluation
    report = edited(report, "overall.auc", Metric(value=auc, low=auc, high=auc))
    report = edited(report, "overall.calibration_error.value", error)
    report = edited(report, "comparisons.0.auc_difference.value", yardstick)
    report = edited(report, f"comparisons.{CHAMPION_COMPARISON}.auc_difference.low", low)
    return replace(good, evaluation=report)


@given(auc=numbers, error=numbers, yardstick=numbers, low=numbers)
@example(auc=NAN, error=NAN, yardstick=NAN, low=NAN)
@example(auc=CONFIG.min_auc, error=CONFIG.max_calibration_error, yardstick=1.0, low=1.0)
@example(
    auc=CONFIG.max_plausible_auc,
    error=0.0,
    yardstick=-CONFIG.baseline_model_margin,
    low=-CONFIG.champion_margin,
)
def test_gates_open_exactly_when_each_number_is_within_its_bound(
    good: Evidence, auc: float, error: float, yardstick: float, low: float
) -> None:
    expected = {
        "auc-floor": auc >= CONFIG.min_auc,
        "leak-suspicion": auc <= CONFIG.max_plausible_auc,
        "calibration": 0 <= error <= CONFIG.max_calibration_error,
        "baseline-model": -CONFIG.baseline_model_margin <= yardstick <= 1,
        "champion": -CONFIG.champion_margin <= low <= 1,
    }

    refused = closed(judged(good, auc, error, yardstick, low))

    assert refused.keys() == {name for name, within in expected.items() if not within}


@given(st.lists(numbers, min_size=1, max_size=6))
@example([CONFIG.min_slice_auc])
def test_the_worst_of_all_slices_decides(good: Evidence, aucs: list[float]) -> None:
    first = good.evaluation.slices[0]
    slices = tuple(edited(first, "metrics.auc.value", auc) for auc in aucs)

    refused = closed(with_evaluation(good, "slices", slices))

    assert ("worst-slice" not in refused) == all(CONFIG.min_slice_auc <= auc <= 1 for auc in aucs)


def test_decisions_and_configurations_of_before_are_read_under_todays_names() -> None:
    assert GateResult(name="yardstick", passed=True, evidence="").name == "baseline-model"
    assert PromotionConfig.model_validate({"yardstick_margin": 0.1}).baseline_model_margin == 0.1


def test_a_floor_above_the_ceiling_is_rejected_with_the_fix() -> None:
    with pytest.raises(ValidationError, match="lower the floor or raise the ceiling"):
        PromotionConfig(min_auc=0.9, max_plausible_auc=0.8)


def test_a_recalibrated_champion_is_better_by_its_error_for_its_ranking_is_the_same(
    good: Evidence,
) -> None:
    fit = MapFit(
        map=Calibrator(slope=1.1, intercept=0.2),
        slope_error=0.1,
        intercept_error=0.1,
        window=shared.month(7),
        num_rows=1000,
    )
    made = Calibration(source=good.champion, fit=fit, whole_map=fit.map)
    better = PromotionConfig(champion_rule="better")
    same = Metric(value=0.0, low=-1e-6, high=1e-6)

    def judged(source: ModelVersionRef | None, brier: Metric) -> dict[str, str]:
        calibration = made.model_copy(update={"source": source}) if source else None
        manifest = good.record.manifest.model_copy(update={"calibration": calibration})
        against = good.evaluation.comparisons[CHAMPION_COMPARISON].model_copy(
            update={"auc_difference": same, "brier_difference": brier}
        )
        comparisons = (good.evaluation.comparisons[0], against)
        evaluation = good.evaluation.model_copy(update={"comparisons": comparisons})
        record = replace(good.record, manifest=manifest)
        return closed(replace(good, record=record, evaluation=evaluation), better)

    other = good.champion.model_copy(update={"version": 7})
    assert judged(good.champion, metric(-0.02)) == {}
    assert (
        "at or above -0.0050 of a recalibration, and the Brier score surely lower; it changed by "
        "-0.0050 [-0.0150, +0.0050]"
    ) in judged(good.champion, metric(-0.005))["champion"]
    assert "champion" in judged(None, metric(-0.02))
    assert "champion" in judged(other, metric(-0.02))


def leader(score: float, earlier: float | None, trusted: bool = False) -> SingleFeature:
    return SingleFeature(name="view__feature", score=score, earlier_score=earlier, trusted=trusted)


@pytest.mark.parametrize(
    ("feature", "is_open"),
    [
        (leader(0.74, 0.52), False),
        (leader(0.74, 0.52, trusted=True), True),
        (leader(0.74, 0.70), True),
        (leader(0.74, None), True),
        (leader(0.66, 0.52), True),
    ],
)
def test_an_input_that_alone_carries_all_and_was_not_known_a_row_earlier_is_suspected(
    good: Evidence, feature: SingleFeature, is_open: bool
) -> None:
    refused = closed(with_evaluation(good, "leading", (feature,)))

    assert ("leak-suspicion" not in refused) is is_open
    assert is_open or "view__feature alone gives 0.7400" in refused["leak-suspicion"]


def test_a_baseline_model_that_is_too_good_closes_the_gate_though_the_candidate_is_not(
    good: Evidence,
) -> None:
    """The label's own column among the inputs: boosting finds it, the network may not."""
    refused = closed(with_evaluation(good, "baseline_model.auc.value", 1.0))

    assert "of the baseline model 1.0000" in refused["leak-suspicion"]
