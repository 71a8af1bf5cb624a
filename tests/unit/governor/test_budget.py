"""Cool-down and the week's budget."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.governor.budget import Spent, why_not_now
from tasks.governor.config import GovernorConfig
from tasks.governor.decision import Action
from tasks.governor.records import Outcome
from tests.unit.governor.builders import FIRST_DAY

NOW = FIRST_DAY + timedelta(days=30)
CONFIG = GovernorConfig(cool_down_hours=6, max_runs_per_week=3, max_run_hours_per_week=2)


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
        ([spent(20, seconds=None)], None, ""),
    ],
)
def test_the_first_bound_that_breaks_is_named(
    earlier: list[Spent], outcome: Outcome | None, words: str
) -> None:
    refusal = why_not_now(Action.RETRAIN, NOW, earlier, CONFIG)
    assert (refusal and refusal.outcome) == outcome
    assert words in (refusal.reason if refusal else "")


def test_a_budget_of_nothing_never_retrains() -> None:
    refusal = why_not_now(Action.RETRAIN, NOW, [], GovernorConfig(max_runs_per_week=0))
    assert refusal is not None
    assert refusal.outcome is Outcome.BUDGET


def test_a_roll_back_waits_for_nothing() -> None:
    assert why_not_now(Action.ROLL_BACK, NOW, [spent(0.1)], CONFIG) is None


@given(st.lists(st.floats(0, 400), max_size=8), st.floats(0, 400))
def test_time_alone_never_forbids_what_was_allowed(hours: list[float], later: float) -> None:
    earlier = [spent(h) for h in hours]
    if why_not_now(Action.RETRAIN, NOW, earlier, CONFIG) is None:
        assert why_not_now(Action.RETRAIN, NOW + timedelta(hours=later), earlier, CONFIG) is None
