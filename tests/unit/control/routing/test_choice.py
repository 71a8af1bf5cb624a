"""Where a stage goes: wait, fall back or fail, by the stated rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.control.config import StageRouting
from tasks.control.routing.task import Place, choose
from tests.support.suite.promises import Promise, proves


def place(name: str, *, workers: int = 1, fault: str | None = None) -> Place:
    return Place(f"training/{name}", name, name, workers, fault)


def test_without_a_worker_a_stage_waits_as_long_as_it_may_and_says_so() -> None:
    rule = StageRouting(hardware_class="gpu", wait_s=60, fall_back=("cpu",))
    choice = choose(rule, place("gpu", workers=0), [place("cpu")], 59)
    assert choice.place is None
    assert choice.wait
    assert "no worker of work pool 'gpu' is online; waited 59 s of at most 60 s" in choice.reason


@proves(Promise.NO_FALLBACK, "the other class is taken by rule, and recorded")
def test_after_the_wait_the_next_class_is_taken_and_the_refusal_is_kept() -> None:
    rule = StageRouting(hardware_class="gpu", wait_s=60, fall_back=("cpu",))
    choice = choose(rule, place("gpu", workers=0), [place("cpu")], 60)
    assert choice.place == place("cpu")
    assert choice.rule == "fall back"
    assert "training/gpu: no worker" in choice.refused[0]


def test_with_no_class_left_the_sentence_says_what_to_do() -> None:
    rule = StageRouting(hardware_class="gpu", wait_s=0)
    choice = choose(rule, place("gpu", workers=0), [], 0)
    assert choice.place is None
    assert not choice.wait
    assert "prefect worker start --pool gpu" in choice.reason
    assert "fall_back" in choice.reason


places = st.builds(
    Place,
    deployment=st.sampled_from(["t/a", "t/b", "t/c"]),
    hardware_class=st.just("cpu"),
    pool=st.just("cpu"),
    num_workers_online=st.integers(0, 2),
    fault=st.sampled_from([None, "it is paused"]),
)


@given(
    wanted=places,
    others=st.lists(places, max_size=2),
    wait_s=st.floats(0, 100),
    waited_s=st.floats(0, 200),
)
def test_no_run_is_sent_where_it_cannot_run(
    wanted: Place, others: list[Place], wait_s: float, waited_s: float
) -> None:
    choice = choose(StageRouting(wait_s=wait_s), wanted, others, waited_s)
    if choice.place is not None:
        assert choice.place.refusal is None
        assert not choice.wait
    if choice.rule == "fall back" and choice.place is not None:
        assert wanted.refusal is not None
        assert waited_s >= wait_s
    assert choice.wait == (wanted.refusal is not None and waited_s < wait_s)


@pytest.mark.parametrize("fall_back", [("gpu",), ("cpu", "cpu")])
def test_a_class_named_twice_is_refused(fall_back: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError, match="name each other class once"):
        StageRouting.model_validate({"hardware_class": "gpu", "fall_back": fall_back})
