from datetime import timedelta

import pytest
from pydantic import ValidationError

from tasks.contracts.rollout import Action, Evidence
from tasks.release.config import ReleaseConfig, StepConfig
from tasks.release.policy import decide
from tasks.release.records import Release
from tests.support.release.builders import CONFIG, START, STEPS, evidence, finding, release

LATER = START + timedelta(minutes=5)


@pytest.mark.parametrize("metric", ["errors", "latency", "scores", "task_paired", "task_split"])
def test_harm_of_each_metric_rolls_back_though_little_was_seen(metric: str) -> None:
    seen = evidence(finding(metric, harm=True), step_requests=1, num_labels=0)
    decision = decide(release(), seen, LATER)
    assert decision.action is Action.ROLL_BACK
    assert metric.replace("_", " ") in decision.reason


FIRST = STEPS[0].model_copy(update={"min_labels": 10})
LABELLED = release(CONFIG.model_copy(update={"steps": (FIRST, *STEPS[1:])}))
LEAST = evidence(step_requests=FIRST.min_requests, num_labels=10)
HELD = release(held_by="Amal")
FEED = {"faults": ("the feed is broken",)}
WORSE, FAILING = (finding(metric, harm=True) for metric in ("task_paired", "errors"))


@pytest.mark.parametrize(
    ("seen", "known", "minutes", "decided"),
    [
        (evidence(WORSE, **FEED), release(), 5, ("hold", "common_fault")),
        (evidence(FAILING, **FEED), release(), 5, ("roll_back", "errors")),
        (evidence(WORSE, split_fault="half went"), release(), 5, ("hold", "split")),
        (evidence(WORSE), release(), 0.1, ("roll_back", "harm")),
        (evidence(), release(), 0.5, ("hold", "too_early")),
        (evidence(step_requests=499), release(), 5, ("hold", "too_few")),
        (evidence(num_labels=9), LABELLED, 5, ("hold", "too_few_labels")),
        (evidence(label_fault="a part is damaged"), release(), 5, ("hold", "labels")),
        (evidence(), HELD, 5, ("hold", "held")),
        (evidence(WORSE), HELD, 5, ("roll_back", "harm")),
        (LEAST, LABELLED, FIRST.min_minutes, ("promote", "passed")),
        (LEAST, LABELLED, FIRST.max_minutes, ("hold", "timeout")),
    ],
    ids=[
        *("a fault of both versions", "a fault of both excuses no failures", "a wrong split"),
        *("harm before the step may end", "too early", "too few requests", "too few labels"),
        *("labels that cannot be read", "a person holds", "a held release is worse"),
        *("bounds that are just reached", "the last minute is over"),
    ],
)
def test_the_first_rule_that_applies_decides(
    seen: Evidence, known: Release, minutes: float, decided: tuple[str, str]
) -> None:
    decision = decide(known, seen, START + timedelta(minutes=minutes))
    assert (decision.action.value, decision.rule) == decided
    assert seen.label_fault in decision.reason


def test_a_promotion_says_what_follows() -> None:
    for step, then in ((0, "next step quarter"), (len(STEPS) - 1, "it is released")):
        decision = decide(release(step=step), evidence(), START + timedelta(hours=1))
        assert decision.reason.endswith(f"labels show no harm; {then}")


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
