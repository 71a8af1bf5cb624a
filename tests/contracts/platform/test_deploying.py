"""A deploy to a real Prefect server: once, again, after changes, and for two use cases."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from prefect import flow, runtime
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events.schemas.automations import Automation
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled

from flows.config import PipelineConfig, read_pipeline_config
from flows.stages import hours_or_newest, refresh_run_name
from infra.deploying.automations import AutomationItem, decide_on_drift, notifications
from infra.deploying.deploy import Plan, check, make_plan
from tasks.contracts.base import TimeWindow
from tasks.features.tables.ledger import Ledger
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.host.processes import wait_until
from tests.support.platform.deploys import (
    REPO,
    decisions,
    emit,
    on_server,
    part_of_the_file,
    plan_of,
    redeploy,
    send,
    wait_until_known,
)
from tests.support.services.listeners import mail_listener, webhook_listener
from tests.support.services.prefect_platform import PrefectApi, prefect_api_server
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

BURST = 500
LOOKED_AT = ("feature_refresh", "training", "drift_check", "parity_check", "search", "decision")


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectApi]:
    """A server of its own: what is deployed has the names that it has everywhere."""
    with prefect_api_server(tmp_path_factory.mktemp("deploying")) as server, server.in_process():
        yield server


@pytest.fixture(scope="module")
def plan(api: PrefectApi, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A part of what the files say, so that each deploy here is short; deployed once."""
    planned = plan_of(part_of_the_file(*LOOKED_AT), tmp_path_factory.mktemp("file"))
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


@pytest.mark.slow
def test_a_second_deploy_changes_nothing_and_neither_does_prefects_own(
    api: PrefectApi, plan: Plan, tmp_path: Path
) -> None:
    before = trace(plan)
    assert redeploy(plan).written == []
    assert trace(plan) == before

    on_server(lambda client: pause_schedule(client, "drift-check/cpu"))
    (tmp_path / "part.yaml").write_text(part_of_the_file(*LOOKED_AT))
    command = ["prefect", "--no-prompt", "deploy", "--all", "--prefect-file"]
    own = subprocess.run(
        [sys.executable, "-m", *command, str(tmp_path / "part.yaml")],
        cwd=PROJECT_ROOT,
        env=api.command_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert own.returncode == 0, own.stdout[-2000:] + own.stderr[-2000:]
    found = on_server(lambda client: check(client, plan))
    assert found.differences == []
    assert "deployment drift-check/cpu: schedule drift-daily is paused" in "".join(found.notes)
    assert automation("decide-on-drift").model_dump(mode="json") == before["automation"]
    assert redeploy(plan_of(part_of_the_file(*LOOKED_AT), tmp_path, resume=True)).written == [
        "deployment drift-check/cpu"
    ]
    assert deployments(plan)["drift-check/cpu"].schedules[0].active


async def pause_schedule(client: PrefectClient, name: str) -> None:
    found = await client.read_deployment_by_name(name)
    await client.update_deployment_schedule(found.id, found.schedules[0].id, active=False)


def test_a_click_in_the_ui_finds_the_whole_use_case_filled_in(plan: Plan) -> None:
    found = deployments(plan)["drift-check/cpu"]
    assert found.parameters["window"] is None
    assert found.parameters["config"]["features"]["training_set"]["label"]
    assert found.enforce_parameter_schema
    assert "PipelineConfig" in (found.parameter_openapi_schema or {})["definitions"]
    assert found.pull_steps == []
    assert found.path is None


def test_a_scheduled_run_is_there_before_its_time(plan: Plan) -> None:
    deployment = deployments(plan)["feature-refresh/cpu"].id
    runs = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment]))

    def planned_runs() -> list[Any]:
        return on_server(lambda client: client.read_flow_runs(flow_run_filter=runs))

    wait_until(planned_runs, "the scheduler made no run", limit_s=180)
    first = min(planned_runs(), key=lambda run: run.next_scheduled_start_time)
    assert first.auto_scheduled
    assert first.next_scheduled_start_time.minute == 5
    assert first.work_queue_name == "urgent"


@pytest.mark.slow
def test_a_changed_entry_changes_its_deployment_alone(plan: Plan, tmp_path: Path) -> None:
    text = part_of_the_file(*LOOKED_AT)
    assert text.count("15 4 * * *") == 1
    before = trace(plan)
    changed = plan_of(text.replace("15 4 * * *", "45 3 * * *"), tmp_path)

    [difference] = on_server(lambda client: check(client, changed)).differences
    assert "parity-check/cpu: schedules.parity-daily.cron should be '45 3 * * *'" in difference
    assert redeploy(changed).written == ["deployment parity-check/cpu"]
    after = trace(changed)
    assert {name for name in before if before[name] != after[name]} == {"parity-check/cpu"}
    [[slug, schedule_id, _]] = after["parity-check/cpu"][2]
    assert (slug, schedule_id) == before["parity-check/cpu"][2][0][:2]
    redeploy(plan)


@pytest.mark.slow
def test_a_schedule_that_the_file_no_longer_has_is_removed(plan: Plan, tmp_path: Path) -> None:
    content = yaml.safe_load(part_of_the_file(*LOOKED_AT))
    for entry in content["deployments"]:
        if entry["entrypoint"].endswith("parity_check_flow"):
            del entry["schedules"]
    redeploy(plan_of(yaml.safe_dump(content), tmp_path))
    assert deployments(plan)["parity-check/cpu"].schedules == []
    redeploy(plan)
    assert [s.slug for s in deployments(plan)["parity-check/cpu"].schedules] == ["parity-daily"]


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
    (tmp_path / "part.yaml").write_text(part_of_the_file(*LOOKED_AT))
    arguments = ["--file", str(tmp_path / "part.yaml"), "--repo", REPO]
    assert main(["deploy", "--check", *arguments]) == 1
    told = capsys.readouterr().out
    assert "deployment training/cpu: tags should be ['falaj', 'training'] and is ['mine']" in told
    assert "deployment training/cpu: concurrency_limit should be 1 and is 7" in told
    assert "queues of cpu: batch.priority should be 5 and is 1" in told
    assert main(["deploy", *arguments]) == 0
    assert main(["deploy", "--check", *arguments]) == 0


@pytest.mark.slow
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
    redeploy(plan_of(part_of_the_file(*LOOKED_AT), tmp_path, resume=True))
    found = deployments(plan)
    assert not found["search/search"].paused
    assert found["parity-check/cpu"].schedules[0].active
    assert automation("decide-on-drift").enabled
    assert automation("decide-on-drift").id == automation_id


@pytest.mark.slow
def test_a_deployment_of_the_earlier_name_hands_over_its_pauses_and_is_removed_when_no_run_needs_it(
    plan: Plan,
) -> None:
    [item] = [i for i in plan.deployments if i.full_name == "retraining-sweep/retraining-sweep"]
    [schedule] = item.entry.schedules
    old_names = {
        "name": "coordinator",
        "schedules": (schedule.model_copy(update={"slug": "governor-sweep"}),),
    }
    earlier = replace(
        item,
        flow=item.flow.with_options(name="governor-sweep"),
        entry=item.entry.model_copy(update=old_names),
    )

    async def go_back(client: PrefectClient) -> UUID:
        await client.delete_deployment((await find(client, item.full_name)).id)
        await earlier.write(client)
        await pause_schedule(client, earlier.full_name)
        old = await find(client, earlier.full_name)
        await client.pause_deployment(old.id)
        return (await client.create_flow_run_from_deployment(old.id)).id

    async def find(client: PrefectClient, name: str) -> DeploymentResponse:
        return await client.read_deployment_by_name(name)

    waiting = on_server(go_back)
    outcome = redeploy(plan)
    assert outcome.written == [item.label]
    assert outcome.differences == []
    assert "1 runs of governor-sweep/coordinator" in "".join(outcome.notes)
    new = deployments(plan)[item.full_name]
    assert new.paused
    assert [(s.slug, s.active) for s in new.schedules] == [("retraining-sweep", False)]
    assert on_server(lambda client: find(client, earlier.full_name)).schedules == []
    assert redeploy(plan, prune=True).written == []

    on_server(lambda client: client.set_flow_run_state(waiting, Cancelled(), force=True))
    assert redeploy(plan).written == [item.label]
    with pytest.raises(ObjectNotFound):
        on_server(lambda client: find(client, earlier.full_name))
    assert deployments(plan)[item.full_name].id == new.id
    redeploy(replace(plan, deployments=tuple(replace(d, resume=True) for d in plan.deployments)))


@pytest.mark.slow
def test_a_second_use_case_has_deployments_of_its_own_beside_the_first(
    plan: Plan, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(REPO, other)
    described = (other / "use_case.yaml").read_text()
    renamed = described.replace("name: flights\n", "name: other\n", 1)
    (other / "use_case.yaml").write_text(renamed.replace("model_name: ", "model_name: other-", 1))
    before = trace(plan)
    both = plan_of(part_of_the_file(*LOOKED_AT), tmp_path, [REPO, f"{other}=/srv/other"])
    outcome = redeploy(both)

    further = {label for label in outcome.written if label.endswith("-other")}
    assert set(outcome.written) == further
    assert "deployment training/gpu-other" in further
    assert "deployment decision/decision-other" not in further
    assert {name: value for name, value in trace(both).items() if name in before} == before
    found = deployments(both)["drift-check/cpu-other"]
    assert found.parameters["config"]["name"] == "other"
    assert found.job_variables["env"] == {"FALAJ_FEATURE_REPO": "/srv/other"}
    assert found.tags == ["falaj", "drift", "other"]
    assert [s.slug for s in found.schedules] == ["drift-daily"]

    alone = on_server(lambda client: check(client, plan))
    assert alone.differences == []
    assert "deployment training/gpu-other: is no longer deployed" in "".join(alone.notes)
    removed = redeploy(plan, prune=True).written
    assert {f"{label} (removed)" for label in further} == set(removed)


@pytest.mark.slow
@proves(Promise.DRIFT_BURST, "one decision, also after a redeploy")
def test_a_burst_of_results_starts_one_decision_even_across_a_redeploy(plan: Plan) -> None:
    model, started = "falaj.model.burst", decisions
    emit(model, BURST)
    wait_until(started, "no decision was started", limit_s=120)
    redeploy(plan)
    emit(model, 20)
    wait_until_known(BURST + 20)
    [run] = started()
    assert run.parameters["result_id"].startswith("result-")
    emit("falaj.model.another", 1)
    wait_until(lambda: len(started()) == 2, "no decision for another model", limit_s=120)


@pytest.mark.slow
def test_an_equal_automation_is_left_alone_and_a_changed_one_is_updated(plan: Plan) -> None:
    before = automation("decide-on-drift")
    slower: AutomationItem = decide_on_drift(cooldown_s=900)
    changed = replace(plan, automations=(slower, *plan.automations[1:]))
    [description, within] = on_server(lambda client: check(client, changed)).differences
    assert "automation decide-on-drift: description should be" in description
    assert "trigger.within should be 900.0 and is 300.0" in within
    assert redeploy(changed).written == ["automation decide-on-drift"]
    after = automation("decide-on-drift")
    assert after.id == before.id
    assert after.trigger.model_dump()["within"].total_seconds() == 900
    redeploy(plan)


def test_the_whole_file_deploys(plan: Plan) -> None:
    whole = make_plan([REPO])
    assert len(whole.deployments) > len(plan.deployments)
    redeploy(whole)
    assert set(deployments(whole)) == {item.full_name for item in whole.deployments}


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:'imghdr' is deprecated:DeprecationWarning"
)  # apprise, in Slack's
def test_people_are_told_by_webhook_and_mail_with_what_to_do_next(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with webhook_listener() as (address, posted), mail_listener() as (port, mails):
        monkeypatch.setenv("FALAJ_NOTIFY_WEBHOOK", address)
        mail = f"mailto://127.0.0.1:{port}?from=falaj@example.org&to=team@example.org&mode=insecure"
        monkeypatch.setenv("FALAJ_NOTIFY_EMAIL", mail)
        telling = plan_of(part_of_the_file(*LOOKED_AT), tmp_path)
        written = redeploy(telling).written
        assert "block custom-webhook/falaj-webhook" in written
        assert "block slack-webhook/falaj-email" in written
        assert {f"automation {n.automation_name}" for n in notifications()} <= set(written)
        assert redeploy(telling).written == []

        closed = [{"gate": "min_auc", "evidence": "AUC 0.61 is below 0.70"}]
        refused = {"model": "delay", "version": 7, "closed": closed, "champion": 6}
        send([("falaj.promotion.refused", "falaj.model.delay", refused)])
        wait_until(lambda: posted and mails, "nobody was told", limit_s=120)
        assert "delay version 7 was refused" in posted[0]["subject"]
        assert "min_auc: AUC 0.61 is below 0.70" in posted[0]["body"]
        assert "What to do next" in posted[0]["body"]
        assert mails[0]["Subject"].startswith("Falaj: delay version 7 was refused")

    monkeypatch.setenv("FALAJ_NOTIFY_WEBHOOK", "https://other.example.org/?token=secret")
    moved = plan_of(part_of_the_file(*LOOKED_AT), tmp_path)
    assert on_server(lambda client: check(client, moved)).differences == [
        "block custom-webhook/falaj-webhook: secrets.address is another one"
    ]


@flow(name="which-window", flow_run_name=refresh_run_name)
def which_window(window: TimeWindow | None, config: PipelineConfig) -> tuple[str, TimeWindow]:
    """Name and window of a run that is started as feature refreshes are."""
    return str(runtime.flow_run.name), hours_or_newest(window, config)


def test_a_run_without_a_window_takes_the_newest_hours_and_is_named_by_them(
    api: PrefectApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path))
    (tmp_path / "feast").mkdir()
    ledger = Ledger(version="0", definitions="0", mark=0, views=())
    (tmp_path / "feast" / "materialized.json").write_text(ledger.model_dump_json())
    config = read_pipeline_config(Path(REPO))
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


def test_the_first_refresh_begins_where_the_use_case_begins(
    api: PrefectApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a new state folder the newest hours alone would be refused: they have no past."""
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path))
    config = read_pipeline_config(Path(REPO))
    newest = config.clock.newest_hours(datetime.now(UTC))
    name, window = which_window(None, config)
    assert window.start == min(config.window.start, newest.start)
    assert window.end in (newest.end, config.clock.newest_hours(datetime.now(UTC)).end)
    assert name == f"refresh-{config.name}-{window.slug}"
