"""The rule: every line of its table, and what must hold for any evidence."""

import math
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.contracts.drift import DriftReport, DriftResult
from tasks.contracts.evaluation import Metric, MetricSet
from tasks.control.config import RetrainingPolicy
from tasks.control.retraining.decision import (
    Action,
    Cause,
    Evidence,
    asks_for_former,
    decide,
    gather,
    healed,
)
from tests.support.control import builders
from tests.support.control.builders import comparison, evidence
from tests.support.data.builders import metric

CONFIG = RetrainingPolicy()
CHANGES = ("auc_change", "excess_brier_change", "r2_change", "skill_change")
SEVERITY = [Action.NOTHING, Action.RECALIBRATE, Action.RETRAIN]


@pytest.mark.parametrize(
    ("rule", "seen", "action", "cause"),
    [
        (1, builders.faulty(0), Action.NOTHING, Cause.FEED),
        (2, builders.stable(0), Action.NOTHING, None),
        (3, builders.hurt(0), Action.ROLL_BACK, Cause.RELEASE),
        (4, builders.shifted(0), Action.RECALIBRATE, Cause.CALIBRATION),
        (5, builders.stale(0), Action.RETRAIN, Cause.MODEL),
        (6, evidence(), Action.RETRAIN, Cause.MODEL),
        (8, evidence(DriftResult.WATCH, auc=metric(-0.1)), Action.NOTHING, None),
    ],
)
def test_each_line_of_the_table_applies_to_its_evidence(
    rule: int, seen: Evidence, action: Action, cause: Cause | None
) -> None:
    choice = decide(seen, CONFIG)
    assert (choice.rule, choice.action, choice.cause) == (rule, action, cause)
    assert choice.reason


@pytest.mark.parametrize("seen", [builders.stable(0), evidence(DriftResult.WATCH)])
def test_a_model_that_holds_is_retrained_where_the_days_to_train_on_have_grown(
    seen: Evidence,
) -> None:
    asked = CONFIG.model_copy(update={"retrain_at_growth": 1.5})
    grown, less = (seen.model_copy(update={"train_growth": growth}) for growth in (1.5, 1.49))
    choice = decide(grown, asked)
    assert (choice.rule, choice.action, choice.cause) == (7, Action.RETRAIN, Cause.GROWTH)
    assert "factor of 1.50" in choice.reason
    assert {decide(less, asked).action, decide(grown, CONFIG).action} == {Action.NOTHING}
    faulty = builders.faulty(0).model_copy(update={"train_growth": 9.0})
    assert decide(faulty, asked).action is Action.NOTHING


def test_days_that_have_grown_end_every_other_trouble_of_a_stable_window() -> None:
    asked = CONFIG.model_copy(update={"retrain_at_growth": 1.5})
    grown = builders.stable(0).model_copy(update={"train_growth": 2.0})
    assert healed(grown, decide(grown, asked)) == frozenset(Cause) - {Cause.GROWTH}


def test_growth_is_what_a_retraining_would_learn_from_to_what_the_champion_did() -> None:
    report = builders.report()
    learnt = report.reference.end - report.reference.start
    held_back = report.current.end - (report.reference.start + 1.75 * learnt)
    seen = gather(report, builders.reference(2), None, None, datetime.now(UTC), held_back)
    assert seen.train_growth == pytest.approx(1.75)


def test_a_young_champion_is_kept_where_its_predecessor_is_not_better_for_certain() -> None:
    unsure = comparison(Metric(value=-0.01, low=-0.03, high=0.001))
    choice = decide(builders.hurt(0).model_copy(update={"former_difference": unsure}), CONFIG)
    assert choice.action is Action.RETRAIN


def test_a_regression_that_went_stale_is_retrained() -> None:
    choice = decide(evidence(r2_change=metric(-0.2), num_labelled=500), CONFIG)
    assert (choice.rule, choice.action) == (5, Action.RETRAIN)
    assert "R² changed by -0.2000" in choice.reason


def test_a_stale_model_of_several_classes_is_retrained_and_never_mapped() -> None:
    report = builders.report(auc=metric(-0.001))
    overall = report.current_performance
    assert isinstance(overall, MetricSet)
    several = overall.model_copy(update={"by_class": {"a": overall}})
    stale = report.model_copy(
        update={"current_performance": several, "result": DriftResult.RETRAIN}
    )
    seen = gather(stale, builders.reference(2), None, None, datetime.now(UTC), timedelta())
    assert decide(seen.model_copy(update={"can_be_mapped": True}), CONFIG).rule == 4
    choice = decide(seen, CONFIG)
    assert (choice.rule, choice.action) == (5, Action.RETRAIN)


def test_drift_without_labels_ends_no_trouble_but_that_of_the_feed() -> None:
    seen = evidence(DriftResult.WATCH)
    assert healed(seen, decide(seen, CONFIG)) == {Cause.FEED}
    known = evidence(DriftResult.WATCH, auc=metric(0.0))
    assert healed(known, decide(known, CONFIG)) == set(Cause)
    assert healed(builders.faulty(0), decide(builders.faulty(0), CONFIG)) == set()


ANY_NUMBER = st.one_of(st.floats(-1, 1), st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))


def metrics(number: st.SearchStrategy[float] = ANY_NUMBER) -> st.SearchStrategy[Metric | None]:
    return st.none() | st.builds(Metric, value=number, low=number, high=number)


def any_evidence() -> st.SearchStrategy[Evidence]:
    differences = st.none() | st.builds(comparison, metrics().filter(bool))
    changes = st.fixed_dictionaries(
        {
            **{f"{name}_change": metrics() for name in ("auc", "excess_brier", "r2", "skill")},
            "num_drifted": st.integers(0, 10),
            "prediction_drifted": st.booleans(),
            "prediction_effect_low": st.floats(0, 1),
            "champion_age_days": st.none() | st.floats(0, 1000),
            "former_version": st.none() | st.integers(1, 5),
            "former_difference": differences,
            "sentences": st.sampled_from([(), ("Fault of the data: a.",)]),
        }
    )
    return st.builds(lambda v, c: evidence(v, **c), st.sampled_from(DriftResult), changes)


def any_config() -> st.SearchStrategy[RetrainingPolicy]:
    return st.builds(
        RetrainingPolicy, roll_back_within_days=st.floats(0, 365), max_auc_loss=st.floats(0, 0.5)
    )


@given(any_evidence(), any_config())
def test_every_evidence_has_one_choice_and_a_fault_never_trains(
    seen: Evidence, config: RetrainingPolicy
) -> None:
    choice = decide(seen, config)
    assert choice == decide(seen, config)
    assert (choice.action is Action.NOTHING) or choice.cause is not None
    if seen.result in (DriftResult.DATA_FAULT, DriftResult.STABLE):
        assert choice.action is Action.NOTHING
    if seen.result is DriftResult.WATCH:
        assert choice.action in (Action.NOTHING, Action.ROLL_BACK)
    if choice.cause is not None:
        assert choice.cause not in healed(seen, choice)


@given(any_evidence(), any_config(), st.floats(0, 1))
def test_a_larger_loss_never_asks_for_less(
    seen: Evidence, config: RetrainingPolicy, more: float
) -> None:
    auc = seen.auc_change
    if auc is None or seen.former_difference is not None:
        return
    worse = Metric(value=auc.value - more, low=auc.low - more, high=auc.high - more)
    before = decide(seen, config).action
    after = decide(seen.model_copy(update={"auc_change": worse}), config).action
    assert SEVERITY.index(after) >= SEVERITY.index(before)


def test_evidence_is_gathered_from_the_report_and_the_standing() -> None:
    report = builders.report(auc=metric(-0.1))
    known = builders.standing(2)
    now = known.promoted_at
    seen = gather(report, builders.reference(2), known, None, now, timedelta())
    assert (seen.version, seen.former_version, seen.champion_age_days) == (2, 1, 0.0)
    assert (seen.num_drifted, seen.drifted, seen.num_labelled) == (1, ("distance",), 1000)
    broken = known.model_copy(update={"previous_trouble": "model.json is missing"})
    assert (
        gather(report, builders.reference(2), broken, None, now, timedelta()).former_version is None
    )
    other = gather(report, builders.reference(3), known, None, now, timedelta())
    assert (other.former_version, other.champion_age_days) == (None, None)
    changes = {name: metric(-0.1 * n) for n, name in enumerate(CHANGES)}
    changed = builders.report().model_copy(update=changes)
    seen = gather(changed, builders.reference(2), known, None, now, timedelta())
    assert {name: getattr(seen, name) for name in CHANGES} == changes
    assert seen.num_labelled == 0


@pytest.mark.parametrize(
    ("report", "days_ago", "trouble", "asks"),
    [
        (builders.report(auc=metric(-0.1)), 1, None, True),
        (builders.report(auc=metric(-0.1)), 15, None, False),
        (builders.report(auc=metric(-0.1)), None, None, False),
        (builders.report(auc=metric(-0.1)), 1, "model.json is missing", False),
        (builders.report(), 1, None, False),
    ],
)
def test_the_former_champion_is_measured_soon_after_a_promotion_and_with_labels(
    report: DriftReport, days_ago: int | None, trouble: str | None, asks: bool
) -> None:
    promoted = None if days_ago is None else datetime.now(UTC) - timedelta(days=days_ago)
    changes = {"promoted_at": promoted, "previous_trouble": trouble}
    champion = builders.standing(2).model_copy(update=changes)
    assert asks_for_former(report, champion, CONFIG) is asks
    for result in DriftResult:
        judged = report.model_copy(update={"result": result})
        expected = asks and result in (DriftResult.WATCH, DriftResult.RETRAIN)
        assert asks_for_former(judged, champion, CONFIG) is expected


def test_a_number_that_could_not_be_computed_is_not_known() -> None:
    lost = Metric(value=math.nan, low=-math.inf, high=math.nan)
    moved = builders.report().prediction.model_copy(update={"effect_low": math.nan})
    report = builders.report(auc=lost).model_copy(update={"prediction": moved})
    seen = gather(
        report, builders.reference(1), None, comparison(lost), builders.FIRST_DAY, timedelta()
    )
    assert (seen.auc_change, seen.former_difference) == (None, None)
    assert seen.prediction_effect_low == 0.0
