"""Cool-down and the week's budget."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.control.config import RetrainingPolicy
from tasks.control.retraining.budget import Spent, carried_out_as, why_not_now
from tasks.control.retraining.decision import Action
from tasks.control.retraining.records import Outcome
from tests.support.control.builders import FIRST_DAY

NOW = FIRST_DAY + timedelta(days=30)
CONFIG = RetrainingPolicy(cool_down_hours=6, max_runs_per_week=3, max_run_hours_per_week=2)


def spent(hours_ago: float, *, seconds: float | None = 60) -> Spent:
    return Spent(NOW - timedelta(hours=hours_ago), seconds)


@pytest.mark.parametrize(
    ("earlier", "outcome", "words"),
    [
        ([], None, ""),
        ([spent(5.9)], Outcome.COOL_DOWN, "free at 2026-01-31 00:06Z"),
        ([spent(6)], None, ""),
        ([spent(20), spent(30), spent(40)], Outcome.BUDGET, "3 retrainings in the last seven"),
        ([spent(20), spent(30), spent(24 * 7)], None, ""),
        ([spent(20, seconds=7200)], Outcome.BUDGET, "took 2.00 h"),
        ([spent(20, seconds=7199.9), spent(30, seconds=None)], None, ""),
    ],
)
def test_the_first_bound_that_breaks_is_named(
    earlier: list[Spent], outcome: Outcome | None, words: str
) -> None:
    refusal = why_not_now(Action.RETRAIN, NOW, earlier, CONFIG)
    assert (refusal and refusal.outcome) == outcome
    assert words in (refusal.reason if refusal else "")


def test_recalibrations_have_a_budget_of_their_own_and_the_cool_down_of_both() -> None:
    config = CONFIG.model_copy(update={"max_recalibrations_per_week": 1})
    mapped = [replace(spent(20), action=Action.RECALIBRATE)]
    trained = [spent(20), spent(30), spent(40)]
    assert why_not_now(Action.RECALIBRATE, NOW, trained, config) is None
    assert why_not_now(Action.RETRAIN, NOW, mapped, config) is None
    over = why_not_now(Action.RECALIBRATE, NOW, mapped, config)
    assert "1 recalibrations in the last seven days, allowed 1" in over.reason
    just_now = replace(spent(1), action=Action.RECALIBRATE)
    assert why_not_now(Action.RETRAIN, NOW, [just_now], config) is None
    for earlier in (just_now, spent(1)):
        held = why_not_now(Action.RECALIBRATE, NOW, [earlier], config)
        assert held.outcome is Outcome.COOL_DOWN
    long = replace(spent(20, seconds=7200), action=Action.RECALIBRATE)
    assert why_not_now(Action.RETRAIN, NOW, [long], config) is not None


@pytest.mark.parametrize(
    ("changes", "earlier", "recalibrates", "reason"),
    [
        ({}, [], True, None),
        ({}, [], False, "no deployment of the flow recalibration"),
        ({"max_recalibrations_per_week": 0}, [], True, "switched off"),
        ({}, [(20, 7, True)], True, "version 7 is the champion still"),
        ({}, [(20, 7, False)], True, None),
        ({}, [(20, 6, True)], True, "did not last"),
        ({}, [(14 * 24, 6, True)], True, None),
        ({}, [(14 * 24 - 0.01, 6, True)], True, "did not last"),
        ({}, [(24 * 400, 7, True)], True, "version 7 is the champion still"),
    ],
)
def test_a_recalibration_becomes_a_retraining_by_a_stated_rule(
    changes: dict[str, float],
    earlier: list[tuple[float, int, bool]],
    recalibrates: bool,
    reason: str | None,
) -> None:
    before = [
        replace(spent(hours), action=Action.RECALIBRATE, version=version, has_ended=ended)
        for hours, version, ended in earlier
    ]
    action, why = carried_out_as(
        Action.RECALIBRATE, 7, NOW, before, CONFIG.model_copy(update=changes),
        recalibrates=recalibrates,
    )  # fmt: skip
    assert action is (Action.RETRAIN if reason else Action.RECALIBRATE)
    assert (reason or "") in (why or "")
    assert carried_out_as(
        Action.RETRAIN, 7, NOW, before, CONFIG, recalibrates=recalibrates
    ) == (Action.RETRAIN, None)  # fmt: skip


def test_a_roll_back_waits_for_nothing() -> None:
    assert why_not_now(Action.ROLL_BACK, NOW, [spent(0.1)], CONFIG) is None


@given(st.lists(st.floats(0, 400), max_size=8), st.floats(0, 400))
def test_time_alone_never_forbids_what_was_allowed(hours: list[float], later: float) -> None:
    earlier = [spent(h) for h in hours]
    if why_not_now(Action.RETRAIN, NOW, earlier, CONFIG) is None:
        assert why_not_now(Action.RETRAIN, NOW + timedelta(hours=later), earlier, CONFIG) is None


def test_the_money_of_thirty_days_is_refused_with_its_numbers() -> None:
    config = CONFIG.model_copy(update={"max_cost_per_month": 10.0})
    paid = replace(spent(24 * 20), amount=9.99, has_ended=True)
    assert why_not_now(Action.RETRAIN, NOW, [paid], config) is None
    more = replace(spent(24 * 29), amount=0.01, has_ended=True, action=Action.RECALIBRATE)
    for action in (Action.RETRAIN, Action.RECALIBRATE):
        refusal = why_not_now(action, NOW, [paid, more], config)
        assert refusal.outcome is Outcome.BUDGET
        assert "cost 10.00 in the last 30 days, allowed 10" in refusal.reason
    assert why_not_now(Action.ROLL_BACK, NOW, [paid, more], config) is None
    long_ago = replace(more, claimed_at=NOW - timedelta(days=30))
    assert why_not_now(Action.RETRAIN, NOW, [paid, long_ago], config) is None
    running = replace(spent(24), has_ended=False)
    assert "has not ended" in why_not_now(Action.RETRAIN, NOW, [running], config).reason
    lost = replace(spent(24 * 3), has_ended=False)  # nobody will ever learn how it ended
    assert why_not_now(Action.RETRAIN, NOW, [lost], config) is None


@given(st.lists(st.tuples(st.floats(0, 96), st.floats(0, 9)), max_size=40), st.floats(0, 20))
def test_no_thirty_days_cost_more_than_the_budget_and_one_run(
    wishes: list[tuple[float, float]], budget: float
) -> None:
    config = RetrainingPolicy(max_cost_per_month=budget, max_runs_per_week=1000, cool_down_hours=0)
    runs, now = list[Spent](), NOW
    for hours, price in wishes:
        now += timedelta(hours=hours)
        if why_not_now(Action.RETRAIN, now, runs, config) is None:
            runs.append(Spent(now, 60, has_ended=True, amount=price))
        month = [run for run in runs if now - run.claimed_at < timedelta(days=30)]
        total, last = sum(run.amount for run in month), runs[-1].amount if runs else 0.0
        assert total <= budget + last + 1e-9
