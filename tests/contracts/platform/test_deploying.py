"""A deploy to a real Prefect server: once, again, after changes, and for two use cases."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import flow, runtime
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events.schemas.automations import Automation

from flows.config import PipelineConfig, read_pipeline_config
from flows.stages import hours_or_newest, run_name
from infra.deploying.automations import decide_on_drift
from infra.deploying.deploy import Plan, check, make_plan
from tasks.contracts.base import TimeWindow
from tasks.features.tables.ledger import Ledger
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.tenants import Tenant, put_tenant
from tests.support.host.processes import run_python, wait_until
from tests.support.platform.deploys import REPO, on_server, part_of_the_file, plan_of, redeploy
from tests.support.services.prefect_platform import PrefectApi, prefect_api_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PART = part_of_the_file(
    "feature_refresh", "training", "drift_check", "parity_check", "search", "decision"
)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectApi]:
    """A server of its own: what is deployed has the names that it has everywhere."""
    with prefect_api_server(tmp_path_factory.mktemp("deploying")) as server, server.in_process():
        yield server


@pytest.fixture(scope="module")
def plan(api: PrefectApi, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A part of what the files say, so that each deploy here is short; deployed once."""
    planned = plan_of(PART, tmp_path_factory.mktemp("file"))
    assert "deployment training/cpu" in redeploy(planned).written
    return planned


def deployments(client_plan: Plan) -> dict[str, DeploymentResponse]:
    async def read(client: PrefectClient) -> dict[str, DeploymentResponse]:
        names = [item.full_name for item in client_plan.deployments]
        return {name: await client.read_deployment_by_name(name) for name in names}

    return on_server(read)


def automation(name: str) -> Automation:
    [found] = on_server(lambda client: client.read_automations_by_name(name))
    return found


def trace(planned: Plan) -> dict[str, Any]:
    """Ids and times of change of all that was deployed."""
    return {
        name: (d.id, d.updated, sorted((s.slug, s.id, s.updated) for s in d.schedules))
        for name, d in deployments(planned).items()
    } | {"automation": automation("decide-on-drift").model_dump(mode="json")}


def test_a_second_deploy_changes_nothing_and_neither_does_prefects_own(
    api: PrefectApi, plan: Plan, tmp_path: Path
) -> None:
    before = trace(plan)
    assert redeploy(plan).written == []
    assert trace(plan) == before

    on_server(lambda client: pause_schedule(client, "drift-check/cpu"))
    (tmp_path / "part.yaml").write_text(PART)
    command = ("-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file")
    options = {"env": api.command_environment(), "stdin": subprocess.DEVNULL}
    own = run_python(*command, str(tmp_path / "part.yaml"), **options)
    assert own.returncode == 0, own.stdout[-2000:] + own.stderr[-2000:]
    found = on_server(lambda client: check(client, plan))
    # Prefect's own command knows nothing of the state that runs are to be of; ours writes it again.
    differences = [d for d in found.differences if "the signature does not fit" not in d]
    assert all("FALAJ_EXPECTED_STATE" in difference for difference in differences)
    assert len(redeploy(plan).written) == len(differences)
    assert "deployment drift-check/cpu: schedule drift-daily is paused" in "".join(found.notes)
    assert automation("decide-on-drift").model_dump(mode="json") == before["automation"]
    resumed = redeploy(plan_of(PART, tmp_path, resume=True))
    assert resumed.written == ["deployment drift-check/cpu"]
    assert deployments(plan)["drift-check/cpu"].schedules[0].active


async def pause_schedule(client: PrefectClient, name: str) -> None:
    found = await client.read_deployment_by_name(name)
    await client.update_deployment_schedule(found.id, found.schedules[0].id, active=False)


def test_a_changed_entry_changes_its_deployment_alone_and_a_changed_automation_itself(
    plan: Plan, tmp_path: Path
) -> None:
    assert PART.count("15 4 * * *") == 1
    before = trace(plan)
    changed = plan_of(PART.replace("15 4 * * *", "45 3 * * *"), tmp_path)
    changed = replace(changed, automations=(decide_on_drift(cooldown_s=900), *plan.automations[1:]))

    told = on_server(lambda client: check(client, changed)).differences
    assert any("parity-check/cpu: schedules.parity-daily.cron should be" in one for one in told)
    assert any("trigger.within should be 900.0 and is 300.0" in one for one in told)
    labels = ["deployment parity-check/cpu", "automation decide-on-drift"]
    assert redeploy(changed).written == labels
    after = trace(changed)
    assert {n for n in before if before[n] != after[n]} == {"parity-check/cpu", "automation"}
    [[slug, schedule_id, _]] = after["parity-check/cpu"][2]
    assert (slug, schedule_id) == before["parity-check/cpu"][2][0][:2]
    assert after["automation"]["id"] == before["automation"]["id"]

    content = yaml.safe_load(PART)
    for entry in content["deployments"]:
        if entry["entrypoint"].endswith("parity_check_flow"):
            del entry["schedules"]
    redeploy(plan_of(yaml.safe_dump(content), tmp_path))
    assert deployments(plan)["parity-check/cpu"].schedules == []
    redeploy(plan)
    assert [s.slug for s in deployments(plan)["parity-check/cpu"].schedules] == ["parity-daily"]


def test_a_click_in_the_ui_finds_the_whole_use_case_filled_in(plan: Plan) -> None:
    found = deployments(plan)["drift-check/cpu"]
    assert found.parameters["window"] is None
    assert found.parameters["config"]["features"]["training_set"]["label"]
    assert found.enforce_parameter_schema
    assert "PipelineConfig" in (found.parameter_openapi_schema or {})["definitions"]
    assert found.pull_steps == []
    assert found.path is None

    runs = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[deployments(plan)["feature-refresh/cpu"].id])
    )

    def planned() -> list[Any]:
        return on_server(lambda client: client.read_flow_runs(flow_run_filter=runs))

    wait_until(planned, "the scheduler made no run", limit_s=180)
    first = min(planned(), key=lambda run: run.next_scheduled_start_time)
    assert first.next_scheduled_start_time.minute == 5
    assert first.work_queue_name == "urgent"


def test_what_a_hand_has_changed_is_told_and_put_right(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from falaj.__main__ import main

    async def change(client: PrefectClient) -> None:
        found = await client.read_deployment_by_name("training/cpu")
        await client.update_deployment(
            found.id, DeploymentUpdate(tags=["mine"], concurrency_limit=7)
        )
        [queue] = [q for q in await client.read_work_queues("cpu") if q.name == "batch"]
        await client.update_work_queue(queue.id, priority=1)

    on_server(change)
    (tmp_path / "part.yaml").write_text(PART)
    arguments = ["--file", str(tmp_path / "part.yaml"), "--repo", REPO]
    assert main(["deploy", "--check", *arguments]) == 1
    told = capsys.readouterr().out
    assert "deployment training/cpu: tags should be ['falaj', 'training'] and is ['mine']" in told
    assert "deployment training/cpu: concurrency_limit should be 1 and is 7" in told
    assert "work pool cpu: queues.batch.priority should be 5 and is 1" in told
    assert "deployments/deployment training/cpu: the signature does not fit" in told
    assert main(["deploy", *arguments]) == 0
    assert main(["deploy", "--check", *arguments]) == 0


def test_what_a_person_has_paused_stays_paused_until_asked(plan: Plan, tmp_path: Path) -> None:
    async def pause(client: PrefectClient) -> None:
        await client.pause_deployment((await client.read_deployment_by_name("search/search")).id)
        await client.pause_automation(automation_id)
        await pause_schedule(client, "parity-check/cpu")

    automation_id = automation("decide-on-drift").id
    on_server(pause)
    outcome = redeploy(plan)
    assert outcome.written == []
    assert {note.split(":")[0] for note in outcome.notes if "by a person" in note} == {
        "deployment search/search",
        "deployment parity-check/cpu",
        "automation decide-on-drift",
    }
    redeploy(plan_of(PART, tmp_path, resume=True))
    found = deployments(plan)
    assert not found["search/search"].paused
    assert found["parity-check/cpu"].schedules[0].active
    assert automation("decide-on-drift").enabled
    assert automation("decide-on-drift").id == automation_id


def test_a_second_use_case_has_deployments_of_its_own_beside_the_first(
    plan: Plan, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(REPO, other)
    described = (other / "use_case.yaml").read_text()
    renamed = described.replace("name: flights\n", "name: other\n", 1)
    (other / "use_case.yaml").write_text(renamed.replace("model_name: ", "model_name: other-", 1))
    before = trace(plan)
    both = plan_of(PART, tmp_path, [REPO, f"{other}=/srv/other"])
    outcome = redeploy(both)

    further = {label for label in outcome.written if label.endswith("-other")}
    assert set(outcome.written) == further
    assert "deployment training/gpu-other" in further
    assert "deployment decision/decision-other" not in further
    assert {name: value for name, value in trace(both).items() if name in before} == before
    found = deployments(both)["drift-check/cpu-other"]
    assert found.parameters["config"]["name"] == "other"
    assert found.job_variables["env"]["FALAJ_FEATURE_REPO"] == "/srv/other"
    assert found.tags == ["falaj", "drift", "other"]
    assert [s.slug for s in found.schedules] == ["drift-daily"]

    alone = on_server(lambda client: check(client, plan))
    assert alone.differences == []
    assert "deployment training/gpu-other: is no longer deployed" in "".join(alone.notes)
    removed = redeploy(plan, prune=True).written
    assert {f"{label} (removed)" for label in further} == set(removed)


def test_the_whole_file_deploys(plan: Plan) -> None:
    whole = make_plan([REPO])
    assert len(whole.deployments) > len(plan.deployments)
    redeploy(whole)
    assert set(deployments(whole)) == {item.full_name for item in whole.deployments}


@flow(name="which-window", flow_run_name=run_name("refresh", hours_or_newest))
def which_window(window: TimeWindow | None, config: PipelineConfig) -> tuple[str, TimeWindow]:
    """Name and window of a run that is started as feature refreshes are."""
    return str(runtime.flow_run.name), hours_or_newest(window, config)


def test_a_run_without_a_window_takes_the_newest_hours_and_is_named_by_them(
    api: PrefectApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path))
    config = read_pipeline_config(Path(REPO))
    # On a new state folder the newest hours alone would be refused: they have no past.
    _, window = which_window(None, config)
    assert window.start == min(
        config.window.start, config.clock.newest_hours(datetime.now(UTC)).start
    )
    (tmp_path / "feast").mkdir()
    ledger = Ledger(version="0", definitions="0", token=0, views=())
    (tmp_path / "feast" / "materialized.json").write_text(ledger.model_dump_json())
    before = datetime.now(UTC)
    name, window = which_window(None, config)
    assert window in (
        config.clock.newest_hours(before),
        config.clock.newest_hours(datetime.now(UTC)),
    )
    assert name == f"refresh-{config.name}-{window.slug}"
    assert which_window(config.current, config) == (
        f"refresh-{config.name}-{config.current.slug}",
        config.current,
    )


def test_a_server_to_which_another_tenant_deployed_takes_nothing(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = trace(plan)
    monkeypatch.setenv("FALAJ_HOME", str(put_tenant(tmp_path, "red", Tenant())))
    with pytest.raises(ConfigurationError, match="holds the state of the installation"):
        redeploy(plan_of(PART, tmp_path))
    assert trace(plan) == before
