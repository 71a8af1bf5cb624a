"""Where a stage goes: wait, fall back, burst or fail, by the stated rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.control.routing.choice import Place, choose
from tasks.control.routing.config import BurstConfig, BurstPool, RoutingConfig, StageRouting
from tests.support.suite.promises import Promise, proves

NO_BURST = BurstConfig()
CLOUD = BurstPool(name="cloud-gpu", hardware_class="gpu", region="eu-west", cost_per_hour=3)
BURST = BurstConfig(
    max_waiting_runs=2, pools=(CLOUD,), data_regions=("eu-west",), max_cost_per_hour=4
)


def place(name: str, *, workers: int = 1, waiting: int = 0, fault: str | None = None) -> Place:
    return Place(f"training/{name}", name, name, workers, waiting, fault)


def test_the_wanted_class_is_taken_while_it_has_a_worker() -> None:
    choice = choose(StageRouting(), place("cpu"), [], NO_BURST, [], 0)
    assert choice.place == place("cpu")
    assert (choice.rule, choice.wait, choice.refused) == ("wanted class", False, ())


def test_without_a_worker_a_stage_waits_as_long_as_it_may_and_says_so() -> None:
    rule = StageRouting(hardware_class="gpu", wait_s=60, fall_back=("cpu",))
    choice = choose(rule, place("gpu", workers=0), [place("cpu")], NO_BURST, [], 59)
    assert choice.place is None
    assert choice.wait
    assert "no worker of work pool 'gpu' is online; waited 59 s of at most 60 s" in choice.reason


@proves(Promise.NO_FALLBACK, "the other class is taken by rule, and recorded")
def test_after_the_wait_the_next_class_is_taken_and_the_refusal_is_kept() -> None:
    rule = StageRouting(hardware_class="gpu", wait_s=60, fall_back=("cpu",))
    choice = choose(rule, place("gpu", workers=0), [place("cpu")], NO_BURST, [], 60)
    assert choice.place == place("cpu")
    assert choice.rule == "fall back"
    assert "training/gpu: no worker" in choice.refused[0]


def test_with_no_class_left_the_sentence_says_what_to_do() -> None:
    rule = StageRouting(hardware_class="gpu", wait_s=0)
    choice = choose(rule, place("gpu", workers=0), [], NO_BURST, [], 0)
    assert choice.place is None
    assert not choice.wait
    assert "prefect worker start --pool gpu" in choice.reason
    assert "fall_back" in choice.reason


def test_a_paused_pool_counts_as_one_without_workers() -> None:
    rule = StageRouting(wait_s=0)
    choice = choose(rule, place("cpu", fault="work pool 'cpu' is paused"), [], NO_BURST, [], 0)
    assert choice.place is None
    assert "is paused" in choice.reason


def test_a_long_queue_sends_a_run_to_the_second_pool_and_says_why() -> None:
    rule = StageRouting(hardware_class="gpu")
    second = [(CLOUD, place("cloud-gpu"))]
    stays = choose(rule, place("gpu", waiting=2), [], BURST, second, 0)
    assert stays.place == place("gpu", waiting=2)
    goes = choose(rule, place("gpu", waiting=3), [], BURST, second, 0)
    assert goes.place == place("cloud-gpu")
    assert goes.rule == "burst"
    assert "3 runs wait for training/gpu, more than 2; cloud-gpu stands in eu-west" in goes.reason


@pytest.mark.parametrize(
    ("changes", "workers", "sentence"),
    [
        ({"data_regions": ("us-east",)}, 1, "the data may be sent to us-east, and it stands in"),
        ({"data_regions": ()}, 1, "the data may be sent to no region"),
        ({"max_cost_per_hour": 2.5}, 1, "it costs 3 an hour, more than the limit of 2.5"),
        ({}, 0, "no worker of work pool 'cloud-gpu' is online"),
    ],
)
def test_a_second_pool_that_may_not_be_taken_is_refused_with_a_sentence(
    changes: dict[str, object], workers: int, sentence: str
) -> None:
    burst = BURST.model_copy(update=changes)
    second = [(CLOUD, place("cloud-gpu", workers=workers))]
    choice = choose(
        StageRouting(hardware_class="gpu"), place("gpu", waiting=9), [], burst, second, 0
    )
    assert choice.place == place("gpu", waiting=9)
    assert sentence in choice.refused[0]


places = st.builds(
    Place,
    deployment=st.sampled_from(["t/a", "t/b", "t/c"]),
    hardware_class=st.just("cpu"),
    pool=st.just("cpu"),
    num_workers_online=st.integers(0, 2),
    num_waiting=st.integers(0, 6),
    fault=st.sampled_from([None, "it is paused"]),
)


@given(
    wanted=places,
    others=st.lists(places, max_size=2),
    second=places,
    region=st.sampled_from(["eu-west", "us-east"]),
    cost=st.floats(0, 10),
    wait_s=st.floats(0, 100),
    waited_s=st.floats(0, 200),
)
def test_no_run_is_sent_where_it_cannot_run_nor_data_where_it_may_not_go(
    wanted: Place,
    others: list[Place],
    second: Place,
    region: str,
    cost: float,
    wait_s: float,
    waited_s: float,
) -> None:
    pool = BurstPool(name="cloud", hardware_class="cpu", region=region, cost_per_hour=cost)
    choice = choose(StageRouting(wait_s=wait_s), wanted, others, BURST, [(pool, second)], waited_s)
    if choice.place is not None:
        assert choice.place.refusal is None
        assert not choice.wait
    if choice.rule == "burst":
        assert (region, choice.place) == ("eu-west", second)
        assert cost <= BURST.max_cost_per_hour
        assert wanted.num_waiting > BURST.max_waiting_runs
    if choice.rule == "fall back" and choice.place is not None:
        assert wanted.refusal is not None
        assert waited_s >= wait_s
    assert choice.wait == (wanted.refusal is not None and waited_s < wait_s)


@pytest.mark.parametrize("fall_back", [("gpu",), ("cpu", "cpu")])
def test_a_class_named_twice_is_refused(fall_back: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError, match="name each other class once"):
        StageRouting.model_validate({"hardware_class": "gpu", "fall_back": fall_back})


def test_a_burst_pool_cannot_bear_the_name_of_an_own_pool() -> None:
    with pytest.raises(ValidationError, match="give each a name of its own"):
        BurstConfig(pools=(CLOUD.model_copy(update={"name": "gpu"}),))


def test_every_stage_has_a_rule() -> None:
    routing = RoutingConfig(training=StageRouting(hardware_class="gpu"))
    assert routing.of("training").hardware_class == "gpu"
    assert routing.of("feature refresh").hardware_class == "cpu"
