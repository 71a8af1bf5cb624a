from datetime import timedelta

import pytest
from pydantic import ValidationError

from tasks.contracts.rollout import Action, Evidence
from tasks.release.config import ReleaseConfig, StepConfig
from tasks.release.policy import decide
from tasks.release.records import Release
from tests.support.release.builders import CONFIG, START, STEPS, evidence, finding, release

LATER = START + timedelta(minutes=5)


def rule(seen: Evidence, known: Release | None = None, minutes: float = 5) -> tuple[str, str]:
    decision = decide(known or release(), seen, START + timedelta(minutes=minutes))
    return decision.action.value, decision.rule


def test_without_harm_the_next_step_follows() -> None:
    decision = decide(release(), evidence(finding()), LATER)
    assert decision.action is Action.PROMOTE
    assert "next step quarter" in decision.reason
    assert "released" in decide(release(step=2), evidence(), LATER).reason


@pytest.mark.parametrize("metric", ["errors", "latency", "scores", "task_paired", "task_split"])
def test_harm_rolls_back_at_once_also_before_the_step_may_end(metric: str) -> None:
    seen = evidence(finding(metric, harm=True), step_requests=1, num_labels=0)
    assert rule(seen, minutes=0.1)[0] == "roll_back"
    assert metric.replace("_", " ") in decide(release(), seen, LATER).reason


def test_a_fault_of_both_versions_excuses_all_but_failures() -> None:
    faults = ("the feed is broken",)
    assert rule(evidence(finding("task_paired", harm=True), faults=faults)) == (
        "hold",
        "common_fault",
    )
    assert rule(evidence(finding("errors", harm=True), faults=faults)) == ("roll_back", "errors")


def test_a_wrong_split_compares_nothing() -> None:
    seen = evidence(finding("latency", harm=True), split_fault="half of them went elsewhere")
    assert rule(seen) == ("hold", "split")


def test_it_waits_for_time_requests_and_labels() -> None:
    assert rule(evidence(), minutes=0.5) == ("hold", "too_early")
    assert rule(evidence(step_requests=499)) == ("hold", "too_few")
    labelled = CONFIG.model_copy(
        update={"steps": (STEPS[0].model_copy(update={"min_labels": 10}), *STEPS[1:])}
    )
    assert rule(evidence(num_labels=9), release(labelled)) == ("hold", "too_few_labels")


def test_labels_that_cannot_be_read_hold_a_release() -> None:
    seen = evidence(label_fault="a part is damaged")
    assert rule(seen) == ("hold", "labels")
    assert "a part is damaged" in decide(release(), seen, LATER).reason


def test_a_persons_hold_stops_steps_and_not_roll_backs() -> None:
    held = release(held_by="Amal")
    assert rule(evidence(), held) == ("hold", "held")
    assert rule(evidence(finding("scores", harm=True)), held) == ("roll_back", "harm")


def test_a_bound_that_is_just_reached_is_kept() -> None:
    step = STEPS[0].model_copy(update={"min_labels": 10})
    config = CONFIG.model_copy(update={"steps": (step, *STEPS[1:])})
    least = evidence(step_requests=step.min_requests, num_labels=10)
    assert rule(least, release(config), minutes=step.min_minutes) == ("promote", "passed")
    assert rule(least, minutes=step.max_minutes) == ("hold", "timeout")


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ((STEPS[1], STEPS[0], STEPS[2]), "never fall"),
        (STEPS[:2], "end with 100"),
        ((STEPS[1], STEPS[1], STEPS[2]), "the same name"),
    ],
)
def test_steps_lead_to_all_traffic(steps: tuple[StepConfig, ...], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        ReleaseConfig(steps=steps)


def test_impossible_steps_are_refused_with_a_sentence() -> None:
    with pytest.raises(ValidationError, match="neither requests nor copies"):
        StepConfig(name="idle", candidate_percent=0)
    with pytest.raises(ValidationError, match="never end well"):
        StepConfig(name="long", candidate_percent=5, min_minutes=9, max_minutes=9)
    with pytest.raises(ValidationError, match="not both"):
        StepConfig(name="all", candidate_percent=100, mirror_percent=5)


def test_labels_are_compared_by_their_kind_where_nothing_else_is_said() -> None:
    assert ReleaseConfig().of_label("classification").ranks
    assert not ReleaseConfig().of_label("regression").ranks
    assert ReleaseConfig(task="auc").of_label("regression").ranks


def test_traffic_follows_the_state() -> None:
    shadow = release().wanted
    assert (shadow.stable, shadow.candidate, shadow.shadow) == ("1", "2", "2")
    assert (shadow.shares.candidate, shadow.shares.mirror) == (0, 100)
    assert release(step=1).wanted.shares.candidate == 25
    done = release(state="released").wanted
    assert (done.stable, done.candidate, done.shares.candidate) == ("2", None, 0)
    for state in ("rolled_back", "superseded"):
        back = release(state=state).wanted
        assert (back.stable, back.candidate, back.shares.candidate) == ("1", None, 0)
    assert release(can_split=False).wanted.stable == "2"
