"""A year in which the relation to the label changes on a day, walked under several policies."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from flows.replay.config import ReplayConfig
from flows.replay.flow import compare_policies
from flows.replay.history import History, parts
from flows.replay.models import Candidate, retrain
from flows.replay.tuning import with_field
from flows.replay.walk import Service, Walk, walk
from tasks.contracts.base import TimeWindow
from tasks.contracts.replay import FalseAlarms, PolicyName, ReplayResult
from tasks.evaluation.recalibration import fit_scored
from tasks.kernel.errors import DataContractError, WindowError
from tests.support.replay import worlds

CHANGED_ON = 125
WINDOW = worlds.window(108, 195)
POLICIES: tuple[PolicyName, ...] = ("never", "monthly", "controller")


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return worlds.history(tmp_path_factory.mktemp("replay"), worlds.rows(CHANGED_ON))


@pytest.fixture(scope="module")
def first(history: History) -> Candidate:
    return retrain(history, history.days(WINDOW.start, WINDOW.end)[0], None)


@pytest.fixture(scope="module")
def walks(history: History, first: Candidate) -> Mapping[PolicyName, Walk]:
    days = history.days(WINDOW.start, WINDOW.end)
    return {policy: walk(history, policy, days, first) for policy in POLICIES}


@pytest.fixture(scope="module")
def result(history: History, first: Candidate, walks: Mapping[PolicyName, Walk]) -> ReplayResult:
    days = history.days(WINDOW.start, WINDOW.end)
    asked = ReplayConfig(start=WINDOW.start, held_out_from=worlds.window(150, 151).start)
    compare: Callable[..., ReplayResult] = compare_policies.fn
    none = FalseAlarms(num_days=1, refused=0, alerts=0, data_faults=0, sentences=())
    return compare(history, asked, first, dict(walks), none, days)


def test_the_controller_retrains_after_the_change_until_a_model_passes(
    walks: Mapping[PolicyName, Walk],
) -> None:
    changed = worlds.window(CHANGED_ON, 365).start
    trainings = [act for act in walks["controller"].acts if act.action == "retrain"]
    late = [act for act in trainings if act.at > changed]
    assert len(trainings) - len(late) <= 1, "twenty-five rows a day leave room for chance"
    assert late[-1].promoted, "a model that learnt the new relation is promoted in the end"
    assert all(b.at - a.at >= timedelta(days=14) for a, b in pairwise(trainings))


def test_a_budget_of_money_holds_on_the_virtual_clock(history: History, first: Candidate) -> None:
    config = with_field(history.config, "retraining.max_cost_per_month", 1e-9)
    days = history.days(WINDOW.start, WINDOW.end)
    acts = walk(replace(history, config=config), "controller", days, first).acts
    trainings = [act for act in acts if act.action == "retrain"]
    waits = [act.reason for act in acts if act.action == "wait"]
    assert trainings, "the first one costs nothing before it has run"
    assert any("in the last 30 days, allowed 1e-09" in reason for reason in waits)
    assert all(b.at - a.at >= timedelta(days=30) for a, b in pairwise(trainings))


def test_never_serves_the_first_model_and_takes_nothing(
    walks: Mapping[PolicyName, Walk], result: ReplayResult
) -> None:
    never = walks["never"]
    use = result.of("never").held_out.use
    assert (use.cpu_s, use.joules, use.amount) == (0, 0, 0), "nothing has a price: none"
    assert len(never.reigns) == 1
    assert not never.acts
    assert not never.spent


def test_monthly_trains_on_the_first_of_each_month(walks: Mapping[PolicyName, Walk]) -> None:
    assert [(act.at.month, act.at.day) for act in walks["monthly"].acts] == [
        (month, 1) for month in range(5, 8)
    ]


def test_a_schedule_does_not_train_the_first_champion_twice(
    history: History, first: Candidate
) -> None:
    begin = worlds.window(120, 121).start  # the first of May
    days = history.days(begin, begin + timedelta(days=3))
    assert not walk(history, "monthly", days, changed(first, made=days[0])).acts


def test_nothing_is_trained_or_judged_on_labels_that_are_not_known_yet(
    history: History, walks: Mapping[PolicyName, Walk]
) -> None:
    lag = timedelta(hours=history.config.clock.label_hours)
    for candidate in (made for each in walks.values() for made in each.made):
        assert candidate.model.splits.test.end <= candidate.model.made - lag


def test_the_figures_can_be_computed_again_from_the_stored_scores(
    history: History, result: ReplayResult
) -> None:
    rows = pd.read_parquet(history.store.path(result.scores))
    times, label = rows[history.columns.event_time], rows[history.columns.label]
    for policy in result.policies:
        for part in (policy.tuned_on, policy.held_out):
            inside = (times >= part.window.start) & (times < part.window.end) & label.notna()
            again = roc_auc_score(label[inside], rows.loc[inside, policy.policy])
            assert part.quality.value == pytest.approx(again, abs=1e-9)


def test_the_oracle_is_nowhere_worse_and_differences_add_up(result: ReplayResult) -> None:
    for policy in result.policies:
        assert policy.held_out.regret.value >= -0.01
        expected = policy.held_out.quality.value - result.of("monthly").held_out.quality.value
        assert policy.held_out.to_monthly.value == pytest.approx(expected)
    assert result.recommended != "oracle"
    assert result.of("controller").held_out.to_never.low > 0


def test_a_walk_in_another_state_gives_the_same_acts_and_scores(
    history: History, walks: Mapping[PolicyName, Walk], tmp_path: Path
) -> None:
    other = worlds.history(tmp_path, worlds.rows(CHANGED_ON))
    days = other.days(WINDOW.start, WINDOW.end)[:40]
    again = walk(other, "controller", days, retrain(other, days[0], None))
    until = days[-1]
    assert again.acts == tuple(act for act in walks["controller"].acts if act.at <= until)
    assert again.results == {
        day: said for day, said in walks["controller"].results.items() if day <= f"{until:%Y-%m-%d}"
    }


def test_a_map_of_scores_learns_from_its_window_alone(history: History, first: Candidate) -> None:
    fit, later = worlds.window(85, 108), worlds.window(102, 125)
    scored = [history.judged(first.model, window) for window in (fit, later)]
    config = history.config.recalibration
    maps = [fit_scored(s, history.columns, config, history.store).fit for s in scored]
    assert [found.num_rows for found in maps if found] == [s.num_rows for s in scored]
    assert maps[0] != maps[1]


def test_rows_that_a_model_has_not_scored_are_refused(history: History, first: Candidate) -> None:
    with pytest.raises(DataContractError, match="has no score for some rows"):
        history.judged(first.model, worlds.window(0, 30))


def test_a_gap_in_the_history_fails_the_checks_of_its_days_and_nothing_else(tmp_path: Path) -> None:
    data = worlds.rows()
    at = data["event_timestamp"]
    gap = (at >= worlds.window(112, 113).start) & (at < worlds.window(124, 125).start)
    other = worlds.history(tmp_path, data[~gap].reset_index(drop=True))
    days = other.days(worlds.window(108, 109).start, worlds.window(135, 136).start)
    walked = walk(other, "controller", days, retrain(other, days[0], None))
    failed = [day for day, said in walked.results.items() if said.startswith("failed: ")]
    assert failed
    assert max(failed) < "2013-05-14"
    assert len(walked.results) == len(days)


def test_a_roll_back_serves_the_one_before(history: History, first: Candidate) -> None:
    moment = WINDOW.start + timedelta(days=1)
    service = Service(history, first, first.model.made)
    service.begin(WINDOW.start)
    other = changed(first, number=first.model.number + 2)
    service.previous, service.champion, service.promoted_at = first, other, moment
    service.roll_back(moment, "it errs more")
    assert service.champion is first
    assert service.state().previous is None
    assert service.acts[-1].action == "roll_back"


def changed(candidate: Candidate, **update: object) -> Candidate:
    """A candidate whose model differs."""
    return candidate.model_copy(update={"model": candidate.model.model_copy(update=update)})


@pytest.mark.parametrize(
    ("start", "judged"), [(20, 100), (100, 90), (100, 364 + 30)], ids=["early", "reversed", "late"]
)
def test_parts_that_do_not_fit_are_refused(history: History, start: int, judged: int) -> None:
    asked = ReplayConfig(
        start=worlds.window(start, start + 1).start,
        held_out_from=worlds.window(judged, judged + 1).start,
    )
    with pytest.raises(WindowError, match="does not fit into the history"):
        parts(history, asked)


def test_a_day_without_a_zone_is_of_the_use_case(history: History) -> None:
    start = worlds.window(100, 101).start
    assert parts(history, ReplayConfig(start=start.replace(tzinfo=None)))[0].start == start


def test_parts_begin_when_a_first_model_can_be_trained(history: History) -> None:
    tuned_on, held_out = parts(history, ReplayConfig())
    assert tuned_on.end == held_out.start
    assert tuned_on.start >= worlds.window(45, 46).start
    assert held_out == TimeWindow(start=held_out.start, end=worlds.window(0, 365).end)
