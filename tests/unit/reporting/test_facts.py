"""What the page says follows from the record, in every outcome that a run can have."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tasks.contracts.drift import DriftResult
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import Approval
from tasks.contracts.run import RunRecord
from tasks.kernel.settings import ArtifactStore
from tasks.reporting import facts
from tests.support.reporting.run_records import metrics, run_record


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    store: Path = tmp_path_factory.mktemp("store")
    return run_record(ArtifactStore(store))


def promotion(record: RunRecord, **changes: object) -> facts.Result:
    decision = record.promotion.model_copy(update=changes)
    return facts.promotion_result(record.model_copy(update={"promotion": decision}))


def test_a_promotion_names_the_version_that_it_replaces(record: RunRecord) -> None:
    result = promotion(record)
    assert (result.tone, result.headline) == ("good", "Promoted: version 3 is the champion")
    assert result.detail == "5 of 5 gates passed; it takes the place of version 2."
    assert promotion(record, previous_champion=None).detail.endswith("it is the first.")


def test_a_champion_that_stays_is_not_called_newly_promoted(record: RunRecord) -> None:
    assert promotion(record, previous_champion=3).headline == "Version 3 stays the champion"


def test_a_refusal_names_the_closed_gates_and_who_stays(record: RunRecord) -> None:
    gates = [g.model_copy(update={"passed": i > 1}) for i, g in enumerate(record.promotion.gates)]
    result = promotion(record, gates=tuple(gates), promoted=False)
    assert result.tone == "bad"
    assert result.headline == "Refused: data was validated, better than the champion"
    assert "3 of 5 gates passed" in result.detail
    assert "version 2 stays the champion" in result.detail


def test_no_closed_gate_and_no_promotion_is_not_called_a_success(record: RunRecord) -> None:
    assert promotion(record, promoted=False).tone == "care"
    assert promotion(record, promoted=False, gates=()).headline == "Version 3 was not moved"


@pytest.mark.parametrize("result", list(DriftResult))
def test_every_drift_result_has_words_and_a_next_step(
    record: RunRecord, result: DriftResult
) -> None:
    drift = record.drift.model_copy(update={"result": result})
    changed = record.model_copy(update={"drift": drift})
    assert facts.drift_result(changed).headline.startswith("Drift: ")
    assert "5 of 31 features drifted" in facts.drift_result(changed).detail
    assert facts.next_step(changed)


def test_the_fastest_variant_is_a_kept_one_for_a_cpu_at_batch_one(record: RunRecord) -> None:
    best = facts.fastest_on_cpu(record.variants)
    assert best is not None
    assert (best[0].name, best[1].batch_rows) == ("onnx-fp32", 1)
    elsewhere = [v.model_copy(update={"hardware_class": "gpu"}) for v in record.variants]
    assert facts.fastest_on_cpu(elsewhere) is None
    assert facts.fastest_on_cpu(record.variants[2:]) is None, "dropped, or never built"


def test_key_figures_say_so_where_no_variant_was_kept(record: RunRecord) -> None:
    changed = record.model_copy(update={"variants": ()})
    tile = next(t for t in facts.key_figures(changed) if "CPU" in t.title)
    assert (tile.value, tile.note) == ("none", "no CPU variant was kept and measured with one row")
    assert facts.describe_conversion(changed) == "No variant was built in this run."


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.001, 0.003, "the candidate is better"),
        (-0.003, -0.001, "the candidate is worse"),
        (-0.001, 0.001, "these rows cannot tell the two apart"),
        (0.0, 0.002, "these rows cannot tell the two apart"),
        (float("nan"), 0.002, "its interval could not be computed"),
    ],
)
def test_a_comparison_claims_only_what_its_interval_allows(
    low: float, high: float, words: str
) -> None:
    assert words in facts.describe_comparison("yardstick", Metric(value=0.001, low=low, high=high))


def test_slices_of_names_run_from_best_to_worst_and_those_of_months_in_time(
    record: RunRecord,
) -> None:
    late = record.evaluation.slices[0].model_copy(
        update={"column": "month", "value": "2013-10", "metrics": metrics(100, 0.99)}
    )
    shuffled = (late, *reversed(record.evaluation.slices))
    report = record.evaluation.model_copy(update={"slices": shuffled})
    groups = facts.slices_by_column(record.model_copy(update={"evaluation": report}))
    aucs = [p.metrics.auc.value for p in groups["carrier"]]
    assert aucs == sorted(aucs, reverse=True)
    assert [p.value for p in groups["month"]] == ["2013-09", "2013-10", "2013-10", "2013-11"]


def test_drifted_features_come_before_larger_effects_that_are_uncertain(record: RunRecord) -> None:
    ordered = facts.features_by_drift(record)
    assert [f.drifted for f in ordered] == sorted((f.drifted for f in ordered), reverse=True)
    assert [f.feature for f in ordered[:3]] == ["month", "temp", "dewp"]


def test_a_nested_configuration_becomes_dotted_rows() -> None:
    config: dict[str, object] = {"a": 1, "network": {"hidden": [2, 3], "empty": {}}, "s": "word"}
    assert facts.settings_of(config) == [
        ("a", "1"), ("network.hidden", "[2, 3]"), ("network.empty", "{}"), ("s", "word"),
    ]  # fmt: skip


def test_the_run_can_be_repeated_only_as_far_as_the_code_is_known(record: RunRecord) -> None:
    commit = record.code_commit
    assert facts.describe_rerun(record) == f"git checkout {commit} && make run"
    modified = record.model_copy(update={"code_commit": f"{commit}-modified"})
    assert "not committed" in facts.describe_rerun(modified)
    assert any("not wholly named" in sentence for sentence in facts.limits(modified))
    unknown = record.model_copy(update={"code_commit": "$(reboot)"})
    assert facts.describe_rerun(unknown) == "make run"


def test_the_run_of_another_use_case_is_repeated_with_its_feature_repository(
    record: RunRecord,
) -> None:
    other = record.model_copy(update={"use_case": "other"})
    assert "# FALAJ_FEATURE_REPO names the use case's" in facts.describe_rerun(other)
    assert (facts.describe_repo(record), facts.describe_repo(other)) == ("", "--repo REPOSITORY ")
    assert not any("not wholly named" in sentence for sentence in facts.limits(other))


def test_limits_name_what_was_not_measured(record: RunRecord) -> None:
    drift = record.drift.model_copy(update={"current_performance": None})
    report = record.evaluation.model_copy(update={"comparisons": ()})
    told = " ".join(facts.limits(record.model_copy(update={"drift": drift, "evaluation": report})))
    for words in ("no labels yet", "no champion to compare with", "Energy is not reported",
                  "carrier=OO (20 rows)"):  # fmt: skip
        assert words in told


def test_each_validation_is_counted_once(record: RunRecord) -> None:
    refresh = record.refresh
    doubled = refresh.model_copy(update={"validations": refresh.validations * 2})
    changed = record.model_copy(update={"refresh": doubled})
    assert len(facts.suites(changed)) == len(facts.suites(record)) == 8
    assert "8 validation suites with 83 expectations" in facts.describe_data(changed)


def test_a_test_window_that_training_reached_into_is_not_called_unseen(record: RunRecord) -> None:
    assert "which training never saw" in facts.describe_judging(record)
    report = record.evaluation.model_copy(update={"window": record.model.splits.validation})
    told = facts.describe_judging(record.model_copy(update={"evaluation": report}))
    assert "not all later than what training saw" in told


@pytest.mark.parametrize(
    ("state", "headline"),
    [
        ("waiting", "waits for a person's approval until 2026-11-24 12:00 UTC"),
        ("rejected", "was rejected by Ana"),
        ("timed_out", "nobody answered before 2026-11-24 12:00 UTC"),
    ],
)
def test_a_candidate_that_lacks_a_persons_consent_is_not_called_refused(
    record: RunRecord, state: str, headline: str
) -> None:
    gates = tuple(g.model_copy(update={"passed": True}) for g in record.promotion.gates)
    asked = datetime(2026, 11, 21, 12, tzinfo=UTC)
    approval = Approval.model_validate(
        {"state": state, "asked": asked, "deadline": asked + timedelta(days=3), "approver": "Ana"}
    )
    result = promotion(record, gates=gates, promoted=False, approval=approval)
    assert headline in result.headline
    assert result.tone == "care"
