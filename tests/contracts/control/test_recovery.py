"""Workers and engines that are killed: the sweep puts right what they leave behind."""

import json
import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from prefect import task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.states import Cancelled, Crashed, Running, Scheduled

import infra.platform.api as api_module
from flows.recovery import limits, recovery_sweep_flow
from infra.orchestration.retry import find_run
from infra.platform.api import WORKER_LABEL, end_cut_off
from infra.platform.health import given_up, waiting_for_workers
from tasks.control.config import RecoveryConfig
from tasks.control.recovery import task as recovery
from tasks.kernel.errors import ConfigurationError
from tests.support.host.processes import pids_whose_command_holds, wait_until
from tests.support.platform import routed_flows as routed
from tests.support.platform.deployed import deploy, is_final, wait_for_run
from tests.support.services.prefect_platform import PrefectApi

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COORDINATOR_POOL, STAGE_POOL = "lost-coordinator", "lost-stages"
AT_ONCE = RecoveryConfig(second_look_s=1)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("DEAD_PROCESS_S", "TASK_RUN_GRACE_S"):
        monkeypatch.setattr(f"tasks.control.recovery.judge.{limit}", 1.0)


@pytest.fixture(scope="module")
def client(prefect_api: PrefectApi) -> Iterator[SyncPrefectClient]:
    with prefect_api.in_process(), get_client(sync_client=True) as client:
        routed.deploy_routed(client, COORDINATOR_POOL, STAGE_POOL)
        yield client


def test_a_loop_killed_with_its_worker_is_started_again_and_takes_its_running_stage_up(
    client: SyncPrefectClient, prefect_api: PrefectApi, tmp_path: Path
) -> None:
    (tmp_path / "slow").touch()
    with prefect_api.worker(STAGE_POOL):
        with prefect_api.worker(COORDINATOR_POOL) as coordinator:
            run = routed.start(client, routed.LoopConfig(folder=str(tmp_path)))
            wait_until(lambda: pids_whose_command_holds(str(tmp_path)), "the second stage", 300)
            coordinator.kill()  # the guard, and with it the worker: the engine lives on
            coordinator.wait(60)
            os.kill(int(client.read_flow_run(run).labels[recovery.PID]), signal.SIGKILL)
        left = client.read_flow_run(run)
        assert left.state.is_running(), "nobody said that it is gone"

        with get_client(sync_client=True) as second:
            wait_until(
                lambda: any(
                    done.run == str(run) and done.action == "retry"
                    for done in recovery_sweep_flow(AT_ONCE).done
                ),
                "the sweep has started it again",
                60,
            )
            assert second.read_flow_run(run).state_name == "AwaitingRetry"

        with prefect_api.worker(COORDINATOR_POOL):
            wait_until(
                lambda: routed.journal(tmp_path).count("loop") == 2, "the second attempt", 300
            )
            (tmp_path / "enough").touch()
            done = wait_for_run(client, run, is_final, "the loop has ended", 500)
    assert done.state.is_completed(), done.state.message
    assert routed.journal(tmp_path) == ["loop", "first", "second", "loop"]
    assert not pids_whose_command_holds(str(tmp_path))
    table = client.read_latest_artifacts()
    repaired = [json.loads(str(a.data)) for a in table if a.key == "recovery"]
    assert any(row["outcome"] == "is AwaitingRetry" for rows in repaired for row in rows)


def running_run(client: SyncPrefectClient, labels: dict[str, object]) -> str:
    """A run that is Running by the API's account, its process described by labels."""
    run = client.create_flow_run(routed.loop_flow, parameters={}, state=Running())
    client.update_flow_run_labels(run.id, labels)  # type: ignore[arg-type]
    return str(run.id)


def test_a_run_from_before_a_restart_of_the_host_is_lost_and_those_of_other_hosts_are_not(
    client: SyncPrefectClient,
) -> None:
    own: dict[str, object] = {**recovery.own_labels()}
    alive = running_run(client, own)
    restarted = running_run(client, {**own, recovery.BOOT: str(uuid4())})
    reused = running_run(client, {**own, recovery.STARTED: 1})
    elsewhere = running_run(client, {**own, recovery.HOST: "another"})
    contained = running_run(client, {**own, recovery.SPACE: "pid:[1]", recovery.STARTED: 1})
    lost: set[str] = set()

    def both_are_found() -> bool:
        found = recovery.sweep_once(client, AT_ONCE).done
        lost.update(done.run for done in found if done.action == "crash")
        return {restarted, reused} <= lost

    wait_until(both_are_found, "the sweep has found them", 60)
    assert not {alive, elsewhere, contained} & lost
    states = {run: client.read_flow_run(run).state_name for run in (alive, restarted, elsewhere)}
    assert states == {alive: "Running", restarted: "Crashed", elsewhere: "Running"}
    for run in (alive, elsewhere, contained):
        client.delete_flow_run(run)  # type: ignore[arg-type]


def deployed_run(client: SyncPrefectClient, labels: dict[str, str], num_begun: int) -> UUID:
    """A run of a deployment that was cut off after it had begun so often."""
    deployment = deploy(client, routed.loop_flow, f"lost-{uuid4()}", COORDINATOR_POOL)
    run = client.create_flow_run_from_deployment(deployment)
    client.update_flow_run_labels(run.id, {**labels})
    for _ in range(num_begun):
        client.set_flow_run_state(run.id, Running(), force=True)
    client.set_flow_run_state(run.id, Crashed(), force=True)
    return run.id


def test_a_run_is_started_again_as_its_flow_says_and_in_the_end_given_up(
    client: SyncPrefectClient, prefect_api: PrefectApi
) -> None:
    again = deployed_run(client, {recovery.HOST: "here"}, 1)
    once = deployed_run(
        client, {recovery.HOST: "here", recovery.NOT_RETRIED: "it would be done twice"}, 1
    )
    foreign = deployed_run(client, {}, 1)
    never_begun = deployed_run(client, {}, 0)
    third = deployed_run(client, {recovery.HOST: "here"}, 3)
    done = {each.run: each for each in recovery.sweep_once(client, AT_ONCE).done}
    assert {str(again): "retry", str(never_begun): "retry"} == {
        run: repair.action
        for run, repair in done.items()
        if run in map(str, (again, once, foreign, never_begun, third))
    }
    api = api_module.PrefectApi(prefect_api.url, prefect_api.auth_string)
    name = client.read_flow_run(third).name
    assert [said for said in given_up(api) if f"run {name} was cut off 3 times" in said]

    for _ in range(AT_ONCE.max_retries):  # the server does not count what never begins
        client.set_flow_run_state(never_begun, Crashed(), force=True)
        found = {each.run: each for each in recovery.sweep_once(client, AT_ONCE).done}
    assert str(never_begun) not in found
    name = client.read_flow_run(never_begun).name
    assert [said for said in given_up(api) if f"run {name} was cut off 3 times" in said]
    assert name in {row["run"] for row in recovery.sweep_once(client, AT_ONCE).rows()}


def test_what_a_run_that_was_cut_off_had_called_in_its_process_ends_with_it(
    client: SyncPrefectClient, prefect_api: PrefectApi
) -> None:
    @task
    def standing_for() -> None:
        """Never run here."""

    outer = client.create_flow_run_from_deployment(
        client.read_deployment_by_name("routed-loop/routed-loop").id,
        parameters={"config": {"folder": "unused"}},
    )
    client.update_flow_run_labels(outer.id, {WORKER_LABEL: "killed-worker"})
    client.set_flow_run_state(outer.id, Running(), force=True)
    step = client.create_task_run(standing_for, outer.id, "0", state=Running())
    inner = client.create_flow_run(
        routed.first_flow, parameters={}, state=Running(), parent_task_run_id=step.id
    )
    api = api_module.PrefectApi(prefect_api.url, prefect_api.auth_string)
    cut = end_cut_off(api, {COORDINATOR_POOL: "killed-worker"}, "a test")
    assert {run.id for run in cut} == {str(outer.id), str(inner.id)}
    assert client.read_flow_run(inner.id).state_name == "Crashed"
    assert find_run(client, inner.name).id == outer.id, "a part cannot go on alone"


def test_a_run_that_no_worker_can_take_is_reported(
    client: SyncPrefectClient, prefect_api: PrefectApi
) -> None:
    pool = f"empty-{uuid4()}"
    deployment = deploy(client, routed.loop_flow, "waiting", pool)
    due = datetime.now(UTC) - timedelta(minutes=6)
    run = client.create_flow_run_from_deployment(deployment, state=Scheduled(scheduled_time=due))
    api = api_module.PrefectApi(prefect_api.url, prefect_api.auth_string)
    assert run.name in {row["run"] for row in recovery.sweep_once(client, AT_ONCE).rows()}
    [said] = waiting_for_workers(api, [pool])
    assert run.name in said
    assert f"falaj worker {pool}" in said
    client.delete_flow_run(run.id)
    assert waiting_for_workers(api, [pool]) == []


def test_the_watch_takes_the_limits_that_the_sweep_is_deployed_with(
    client: SyncPrefectClient,
) -> None:
    assert limits(client) == RecoveryConfig()
    given = {"config": {"heartbeat_limit_s": 300}}
    made = deploy(client, recovery_sweep_flow, "recovery-sweep", COORDINATOR_POOL, parameters=given)
    assert limits(client) == RecoveryConfig(heartbeat_limit_s=300)
    client.delete_deployment(made)


def test_a_slot_that_nobody_holds_is_freed(client: SyncPrefectClient) -> None:
    deployment = client.create_deployment(
        flow_id=client.create_flow(routed.second_flow), name="limited", concurrency_limit=1
    )
    limit = f"deployment:{deployment}"
    client.update_global_concurrency_limit(limit, GlobalConcurrencyLimitUpdate(active_slots=1))
    freed = recovery.sweep_once(client, AT_ONCE).slots
    assert limit in {slot.limit for slot in freed}
    assert client.read_global_concurrency_limit_by_name(limit).active_slots == 0


def test_task_runs_of_a_dead_attempt_are_ended_but_not_those_that_stand_for_a_living_run(
    client: SyncPrefectClient,
) -> None:
    @task
    def working() -> None:
        """Never run here."""

    def task_run(run: UUID, key: str) -> UUID:
        return client.create_task_run(working, run, key, state=Running()).id

    dead = client.create_flow_run(routed.loop_flow, parameters={}, state=Running()).id
    cancelled = client.create_flow_run(routed.loop_flow, parameters={}, state=Running()).id
    lost, stage = task_run(dead, "lost"), task_run(dead, "stage")
    ended = task_run(cancelled, "ended")
    child = client.create_flow_run(
        routed.first_flow, parameters={}, state=Running(), parent_task_run_id=stage
    )
    client.set_flow_run_state(dead, Crashed(), force=True)
    client.set_flow_run_state(cancelled, Cancelled(), force=True)

    def states() -> dict[UUID, str | None]:
        recovery.sweep_once(client, AT_ONCE)
        return {each: client.read_task_run(each).state_name for each in (lost, ended, stage)}

    expected = {lost: "Crashed", ended: "Cancelled", stage: "Running"}
    wait_until(lambda: states() == expected, "the task runs have been ended", 60)
    client.delete_flow_run(child.id)


def test_a_run_to_retry_that_is_not_there_is_refused_in_a_sentence(
    client: SyncPrefectClient,
) -> None:
    with pytest.raises(ConfigurationError, match="no run nonsense is among"):
        find_run(client, "nonsense")
    crashed = client.create_flow_run(routed.loop_flow, parameters={}, state=Crashed())
    assert find_run(client, str(crashed.id)[:8]).id == crashed.id
    cancelled = client.create_flow_run(routed.loop_flow, parameters={}, state=Cancelled())
    assert find_run(client, cancelled.name).id == cancelled.id
