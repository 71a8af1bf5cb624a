"""Where a stage goes, what it waits for, and what its run returned."""

import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any, cast
from unittest.mock import MagicMock
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect._internal.result_records import ResultRecordMetadata
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.serializers import JSONSerializer, PickleSerializer
from prefect.states import Completed, Running, Scheduled, State
from pydantic import ValidationError

from tasks.control.config import BurstRule, RoutingConfig, StageRouting
from tasks.control.recovery import task as recovery
from tasks.control.routing import task
from tasks.control.routing import task as routing
from tasks.kernel.errors import DataContractError, StageError, StageLostError
from tasks.registry.promotion import OpenQuestion
from tests.support.platform.routed_flows import Number, first_flow, second_flow
from tests.support.release.builders import refused
from tests.support.suite.promises import Promise, proves


def place(name: str, *, workers: int = 1, fault: str | None = None) -> routing.Place:
    return routing.Place(f"training/{name}", name, name, workers, fault)


@proves(Promise.NO_FALLBACK, "the other class is taken by rule, and recorded")
def test_a_stage_waits_as_long_as_it_may_and_then_takes_the_next_class() -> None:
    rule = StageRouting(hardware_class="gpu", wait_s=60, fall_back=("cpu",))
    first, then = (
        routing.choose(rule, place("gpu", workers=0), [place("cpu")], s) for s in (59, 60)
    )
    assert (first.place, first.wait) == (None, True)
    assert "no worker of work pool 'gpu' is online; waited 59 s of at most 60 s" in first.reason
    assert (then.place, then.rule) == (place("cpu"), "fall back")
    assert "training/gpu: no worker" in then.refused[0]


BURST = BurstRule(hardware_class="gpu", queue_longer_than=3, price_per_hour=2.0, most_per_day=10.0)


@pytest.mark.parametrize(
    ("waiting", "there", "rule", "why"),
    [
        (3, place("gpu"), "wanted class", ""),
        (4, place("gpu"), "burst", ""),
        (4, replace(place("gpu"), barred="no law allows it"), "wanted class", "no law allows it"),
        (4, replace(place("gpu"), cost_today=10.0), "wanted class", "cost 10.00, at most 10"),
        (4, place("gpu", workers=0), "wanted class", "no worker of work pool 'gpu'"),
    ],
)
def test_a_stage_goes_to_the_other_pool_while_the_own_is_behind_and_cost_and_law_allow(
    waiting: int, there: routing.Place, rule: str, why: str
) -> None:
    own = replace(place("cpu"), num_waiting=waiting)
    choice = routing.choose(StageRouting(burst=BURST), own, [], 0, there)
    assert choice.place == (there if rule == "burst" else own)
    assert choice.rule == rule
    assert why in " ".join(choice.refused)
    falls_back = StageRouting(burst=BURST, fall_back=("gpu",), wait_s=0)
    fallen = routing.choose(falls_back, place("cpu", workers=0), [there], 0)
    assert fallen.place == (None if why else there)
    barred = replace(place("cpu"), barred="no law allows it")
    refused = routing.choose(StageRouting(wait_s=600), barred, [], 0)
    assert (refused.place, refused.wait) == (None, False)  # a worker would not help


def test_with_no_class_left_the_sentence_says_what_to_do() -> None:
    rule = StageRouting(hardware_class="gpu", wait_s=0)
    choice = routing.choose(rule, place("gpu", workers=0), [], 0)
    assert choice.place is None
    assert not choice.wait
    assert "falaj worker gpu" in choice.reason
    assert "fall_back" in choice.reason


places = st.builds(
    routing.Place,
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
    wanted: routing.Place, others: list[routing.Place], wait_s: float, waited_s: float
) -> None:
    choice = routing.choose(StageRouting(wait_s=wait_s), wanted, others, waited_s)
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


class NobodyWorks:
    """An API that knows one scheduled run, and no worker."""

    def __init__(self) -> None:
        self.state: State[Any] = Scheduled()

    def read_flow_run(self, run: UUID) -> FlowRun:
        return FlowRun.model_construct(id=run, name="green-hare", state=self.state)

    def read_workers_for_work_pool(self, pool: str) -> list[object]:
        return []

    def set_flow_run_state(self, run: UUID, state: State[Any]) -> None:
        self.state = state


def test_ages_and_costs_are_by_the_servers_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "get_run_logger", lambda: logging.getLogger("a-run"))
    now = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=66)  # by the server's
    beat = now - timedelta(seconds=25)
    worker = Namespace(last_heartbeat_time=beat, heartbeat_interval_seconds=30)
    span = {"estimated_run_time": timedelta(hours=0.1), "end_time": now}
    short = [Namespace(id=number, **span) for number in range(300)]
    long = [Namespace(id="long", estimated_run_time=timedelta(hours=30), end_time=None)]

    def runs(*, limit: int, offset: int, **filters: Any) -> list[Namespace]:
        asked = filters["flow_run_filter"].end_time.after_
        return (short if asked else long)[offset : offset + limit]

    api = MagicMock(read_flow_runs=runs)
    api.request.return_value.headers = {"date": format_datetime(now)}
    api.read_deployment.return_value = Namespace(name="gpu")
    api.read_events.return_value.events = [Namespace(received=now - timedelta(seconds=20))]
    api.read_workers_for_work_pool.return_value = [worker]
    assert routing.num_online(api, "gpu") == 1
    run = FlowRun.model_construct(id=uuid4(), state=Running(), deployment_id=uuid4())
    assert recovery._heartbeat_age_s(api, run, routing.server_now(api)) == 20
    routed = RoutingConfig(training=StageRouting(burst=BURST))
    stage = task._Stage(routing.StageOrder("training", "train", {}, routed, "delay", ""), api)
    assert stage._hours_of("gpu", 301) == pytest.approx(2 * (300 * 0.1 + 24))
    assert (stage._taken_up(run).rule, stage._taken_up(run).price_per_hour) == ("burst", 2.0)


def test_a_stage_that_nobody_takes_says_what_it_waits_for_until_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(task, "get_run_logger", lambda: logging.getLogger("a-run"))
    monkeypatch.setattr(task, "LOG_EVERY_S", 0.1)
    monkeypatch.setattr(task, "QUICK_POLL_S", 0.01)
    api = NobodyWorks()
    order = routing.StageOrder("training", "train", {}, RoutingConfig(), "delay", "")
    stage = task._Stage(order, cast(SyncPrefectClient, api))
    _, untaken_s = stage._follow(api.read_flow_run(uuid4()), "gpu", 0.25)
    assert untaken_s is not None
    assert api.state.is_cancelled()
    said = [r.getMessage() for r in caplog.records if "no worker of work pool 'gpu'" in r.message]
    assert 1 <= len(said) <= 3
    assert "to take green-hare" in said[0]


def completed(path: Path, serializer: Any) -> FlowRun:
    metadata = ResultRecordMetadata(storage_key=str(path), serializer=serializer)
    return FlowRun.model_construct(name="green-hare", state=Completed(data=metadata))


def test_a_result_comes_back_as_what_the_flow_returns(tmp_path: Path) -> None:
    value = (Number(value=14, digits=("1", "4")), Number(value=1, digits=("1",)))
    (tmp_path / "result").write_bytes(JSONSerializer().dumps(value))
    plain = routing.read_plain(completed(tmp_path / "result", JSONSerializer()))
    assert routing.as_returned(plain, second_flow) == value


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    (tmp_path / "result").write_bytes(PickleSerializer().dumps(Number(value=1, digits=())))
    with pytest.raises(StageError, match="'pickle'; only 'json' is read"):
        routing.read_plain(completed(tmp_path / "result", PickleSerializer()))


def test_a_result_that_is_out_of_reach_says_what_to_share(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="FALAJ_STATE"):
        routing.read_plain(completed(tmp_path / "absent", JSONSerializer()))


def test_a_question_that_an_earlier_version_kept_while_suspended_is_read_again() -> None:
    asked = OpenQuestion(digest="d", decision=refused(), markdown="m")
    kept = JSONSerializer().dumps(asked).replace(b"promotion.OpenQuest", b"question.OpenQuest")
    assert b"tasks.registry.question.OpenQuestion" in kept
    assert JSONSerializer().loads(kept) == asked


def test_no_class_that_a_result_names_is_imported() -> None:
    marked = {"__class__": "os.system", "data": {"value": 2, "digits": []}}
    assert routing.as_returned(routing.unmarked(marked), first_flow) == Number(value=2, digits=())


@given(st.recursive(st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_plain_values_pass_unchanged(value: Any) -> None:
    assert routing.unmarked(value) == value
    assert routing.unmarked({"__class__": "any.thing", "data": [value]}) == [value]


def test_training_that_falls_back_to_the_cpu_computes_there_and_nothing_else_changes() -> None:
    asked = {"config": {"training": {"device": "cuda", "num_workers": 2}}, "window": None}
    expected = {"config": {"training": {"device": "cpu", "num_workers": 2}}, "window": None}
    assert routing.on_class(asked, "cpu") == expected
    assert routing.on_class(asked, "gpu") == asked
    assert routing.on_class({"number": 3}, "cpu") == {"number": 3}


BEFORE = "Flow run encountered an exception: "
AWAY = "PrefectHTTPStatusError: Server error '500 ..."
REFUSED = "PrefectHTTPStatusError: Client error '404 ..."


@pytest.mark.parametrize(
    ("message", "kind", "sentence"),
    [
        (f"{BEFORE}DataContractError: 3 nulls: none", DataContractError, "3 nulls: none"),
        (f"{BEFORE}ValueError: seen 3", StageError, f"{BEFORE}ValueError: seen 3"),
        (f"{BEFORE}StageLostError: a\nb", StageLostError, "a\nb"),
        (f"{BEFORE}ConnectError: none", StageLostError, "the Prefect API was away: none"),
        (BEFORE + AWAY, StageLostError, "the Prefect API was away: Server error '500 ..."),
        (BEFORE + REFUSED, StageError, BEFORE + REFUSED),
        ("", StageError, ""),
    ],
)
def test_a_stages_own_error_is_raised_with_its_sentence(
    message: str, kind: type[Exception], sentence: str
) -> None:
    error = routing.child_error(message, "run x")
    assert type(error) is kind
    assert str(error) == f"{sentence} (run x)"
