"""Stages on work pools with a real server and real workers: results, failures, retry, cancel."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.objects import FlowRun
from prefect.states import Scheduled

from tasks.control.config import BurstRule, RoutingConfig, StageRouting
from tasks.control.routing.task import num_waiting, read_plain, server_now
from tests.support.host.processes import pids_whose_command_holds, wait_until
from tests.support.platform import routed_flows
from tests.support.platform.deployed import deploy, is_final, wait_for_run
from tests.support.services.prefect_platform import PrefectApi
from tests.support.suite.promises import Promise, proves

pytestmark = pytest.mark.timeout(900)

COORDINATOR_POOL, STAGE_POOL = "routed-coordinator", "routed-stages"


@pytest.fixture(scope="module")
def client(prefect_api: PrefectApi) -> Iterator[SyncPrefectClient]:
    """Of a server with the loop, and a worker for each of its pools."""
    with prefect_api.in_process(), get_client(sync_client=True) as client:
        routed_flows.deploy_routed(client, COORDINATOR_POOL, STAGE_POOL)
        with prefect_api.worker(COORDINATOR_POOL), prefect_api.worker(STAGE_POOL):
            yield client


def set_state(client: SyncPrefectClient, run: UUID, **state: object) -> None:
    """The call that the buttons of the UI make."""
    reply = client.request(
        "POST",
        "/flow_runs/{id}/set_state",
        path_params={"id": run},
        json={"state": state, "force": False},
    )
    assert reply.json()["status"] == "ACCEPT", reply.text


def ended(client: SyncPrefectClient, run: UUID) -> FlowRun:
    return wait_for_run(client, run, is_final, "the loop has ended", 400)


PLACES = {
    "deployments": (["routed-first/cpu", "routed-second/cpu"], {"wanted class"}),
    "in process": (["this process"] * 2, {"in process"}),
}


@pytest.mark.parametrize("mode", PLACES)
@proves(Promise.INTERRUPT, "finished stages are not repeated")
def test_a_failed_loop_goes_on_from_the_failed_stage_and_gives_what_it_gives_in_process(
    client: SyncPrefectClient, tmp_path: Path, mode: Literal["deployments", "in process"]
) -> None:
    config = routed_flows.LoopConfig(folder=str(tmp_path), routing=RoutingConfig(mode=mode))
    run = routed_flows.start(client, config)
    failed = ended(client, run)
    assert failed.state.name == "Failed"
    said = failed.state.message or ""
    assert "DataContractError: column distance has 3 nulls; nothing was trained" in said
    assert routed_flows.journal(tmp_path) == ["loop", "first", "second"]

    (tmp_path / "allowed").touch()
    set_state(client, run, type="SCHEDULED", name="AwaitingRetry", message="Retry from the UI")
    wait_for_run(client, run, lambda r: r.run_count == 2, "the second attempt")
    done = ended(client, run)
    assert done.state.name == "Completed", done.state.message
    assert routed_flows.journal(tmp_path) == ["loop", "first", "second", "loop", "second"]

    pooled = routed_flows.LoopResult.model_validate(read_plain(done))
    here = routed_flows.loop_flow(routed_flows.LoopConfig(folder=str(tmp_path)))
    assert (pooled.first, pooled.second) == (here.first, here.second)
    routes = [stage.route for stage in pooled.stages]
    assert ([r.taken for r in routes if r], {r.rule for r in routes if r}) == PLACES[mode]
    assert {s.route.taken for s in here.stages if s.route} == {"this process"}


@pytest.mark.slow
@proves(Promise.NO_ORPHANS, "every process of the loop is gone")
def test_cancelling_a_loop_ends_its_stages_processes(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    (tmp_path / "slow").touch()
    run = routed_flows.start(client, routed_flows.LoopConfig(folder=str(tmp_path)))
    wait_until(lambda: pids_whose_command_holds(str(tmp_path)), "the stage's processes", 300)

    set_state(client, run, type="CANCELLING", name="Cancelling")

    wait_until(lambda: not pids_whose_command_holds(str(tmp_path)), "none of them is left", 60)
    cancelled = ended(client, run)
    assert cancelled.state.is_cancelled()


@proves(Promise.NO_FALLBACK, "a failure with what to do, not another class")
def test_a_stage_that_nobody_can_take_fails_the_loop_with_what_to_do(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    gpu = StageRouting(hardware_class="gpu", wait_s=0)
    routing = RoutingConfig(mode="deployments", training=gpu)
    config = routed_flows.LoopConfig(
        folder=str(tmp_path), name=f"routed-{uuid4().hex[:6]}", routing=routing
    )
    with pytest.raises(Exception, match="routed-first/gpu: there is no such deployment") as caught:
        routed_flows.loop_flow(config)
    assert "routing.<stage>.fall_back" in str(caught.value)


@pytest.mark.slow
def test_stages_go_to_another_pool_while_the_own_is_behind_and_stay_again_afterwards(
    client: SyncPrefectClient, prefect_api: PrefectApi, tmp_path: Path
) -> None:
    far = "routed-far"
    deploy(client, routed_flows.first_flow, "gpu", far)
    burst = BurstRule(
        hardware_class="gpu", queue_longer_than=1, price_per_hour=3.6, most_per_day=100
    )
    rule = StageRouting(burst=burst)
    config = routed_flows.LoopConfig(folder=str(tmp_path), routing=RoutingConfig(training=rule))
    (tmp_path / "allowed").touch()
    (tmp_path / "journal").touch()
    client.update_work_pool(STAGE_POOL, WorkPoolUpdate(concurrency_limit=0))
    own = client.read_deployment_by_name("routed-second/cpu").id
    arguments = {"first": {"value": 1, "digits": ["1"]}, "config": config.model_dump(mode="json")}
    waiting = [client.create_flow_run_from_deployment(own, parameters=arguments) for _ in range(3)]
    try:
        with prefect_api.worker(far):
            run = routed_flows.start(client, config)
            wait_until(lambda: "first" in routed_flows.journal(tmp_path), "it ran there", 240)
    finally:
        for each in waiting:
            client.delete_flow_run(each.id)
        client.update_work_pool(STAGE_POOL, WorkPoolUpdate(concurrency_limit=None))
    behind = ended(client, run)
    assert behind.state.name == "Completed", behind.state.message
    route = routed_flows.LoopResult.model_validate(read_plain(behind)).stages[0].route
    assert route
    assert (route.taken, route.rule, route.price_per_hour) == ("routed-first/gpu", "burst", 3.6)
    assert "3 runs wait in work pool 'routed-stages', more than 1" in route.reason

    again = ended(client, routed_flows.start(client, config))
    route = routed_flows.LoopResult.model_validate(read_plain(again)).stages[0].route
    assert route
    assert (route.taken, route.rule) == ("routed-first/cpu", "wanted class")


def test_runs_that_are_held_on_purpose_are_no_queue(client: SyncPrefectClient) -> None:
    pool = f"held-{uuid4()}"
    own = deploy(client, routed_flows.first_flow, pool, pool)
    client.create_work_queue("batch", work_pool_name=pool, concurrency_limit=2)
    client.create_work_queue("paused", work_pool_name=pool, is_paused=True)
    waiting = (("default", "Late"), ("default", "AwaitingConcurrencySlot"))
    for queue, name in (*waiting, ("batch", "Late"), ("paused", "Late")):
        state = Scheduled(scheduled_time=server_now(client), name=name)
        client.create_flow_run_from_deployment(own, state=state, work_queue_name=queue)
    assert num_waiting(client, pool) == 1
