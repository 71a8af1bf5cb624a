"""`prefect.yaml`: what is wrong in it is found before anything is deployed."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow

from flows.stages import not_retried_because, note_process
from infra.deploying.deployments import DeploymentItem, deployment_items, load_flow
from infra.deploying.file import (
    PREFECT_FILE,
    Deployment,
    PrefectFile,
    UseCase,
    read_prefect_file,
    read_use_cases,
)
from infra.deploying.pools import read_pools_file
from infra.orchestration.retry import flow_named
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import DEFAULT_FEATURE_REPO, PROJECT_ROOT

REPO = str(PROJECT_ROOT / DEFAULT_FEATURE_REPO)
FILE = read_prefect_file(environment={})


@pytest.fixture(scope="module")
def use_case() -> UseCase:
    [found] = read_use_cases([REPO])
    return found


@pytest.fixture(scope="module")
def items(use_case: UseCase) -> tuple[DeploymentItem, ...]:
    return deployment_items(FILE, [use_case])


@pytest.mark.parametrize("entry", FILE.deployments, ids=lambda d: f"{d.entrypoint} on {d.name}")
def test_every_deployment_names_a_flow_and_is_called_by_its_hardware_or_its_flow(
    entry: Deployment,
) -> None:
    flow = load_flow(entry.entrypoint)
    assert isinstance(flow, Flow)
    assert inspect.getdoc(flow.fn)
    assert flow.persist_result
    pool = entry.work_pool.name
    assert entry.name == (flow.name if pool == "coordinator" else pool)
    assert "falaj" in entry.tags


@pytest.mark.parametrize("entry", FILE.deployments, ids=lambda d: f"{d.entrypoint} on {d.name}")
def test_every_deployed_run_is_found_when_lost_and_can_be_retried_by_the_command(
    entry: Deployment,
) -> None:
    flow = load_flow(entry.entrypoint)
    assert note_process in flow.on_running_hooks
    assert flow_named(flow.name) is flow


def test_a_run_that_was_cut_off_is_started_again_but_for_flows_that_give_their_reason() -> None:
    flows = {load_flow(entry.entrypoint) for entry in FILE.deployments}
    reasons = {flow.name: not_retried_because(flow) for flow in flows}
    assert {name for name, why in reasons.items() if why} == {
        "approval",
        "retraining-sweep",
        "recovery-sweep",
        "release-by-hand",
    }


def test_every_flow_is_deployed() -> None:
    deployed = {entry.entrypoint for entry in FILE.deployments}
    written = {
        f"flows.{file.stem}.{name}"
        for file in (PROJECT_ROOT / "flows").glob("*.py")
        for name in re.findall(r"^def ([a-z]\w*_flow)\(", file.read_text(), re.MULTILINE)
    }
    assert deployed == written


def test_the_form_of_an_import_says_what_each_field_is_for(
    items: tuple[DeploymentItem, ...],
) -> None:
    [item] = [item for item in items if item.full_name == "model-import/cpu"]
    schema = item.wanted()["parameter_openapi_schema"]
    forms = {"the flow": schema, **schema["definitions"]}
    untold = [
        f"{form}: {name}"
        for form, described in forms.items()
        for name, field in described.get("properties", {}).items()
        if not field.get("description")
    ]
    assert untold == []


def test_a_click_converts_the_champion_again(items: tuple[DeploymentItem, ...]) -> None:
    [item] = [item for item in items if item.full_name == "reconversion/cpu"]
    assert item.parameters["version"] is None
    assert item.parameters["config"]["conversion"]["formats"]


def test_every_pool_and_queue_of_the_file_is_made() -> None:
    pools = read_pools_file()
    for kind in (pools.process, pools.kubernetes):
        assert {entry.work_pool.name for entry in FILE.deployments} <= set(kind)
    assert {entry.work_pool.work_queue_name for entry in FILE.deployments} <= set(pools.queues)


def test_what_waits_for_stages_is_on_a_pool_of_its_own() -> None:
    waiting = {"pipeline_flow", "search_flow", "retraining_flow"}
    for entry in FILE.deployments:
        assert (entry.work_pool.name == "coordinator") >= (
            entry.entrypoint.split(".")[-1] in waiting
        )


def test_nothing_is_pulled_and_no_path_of_a_machine_is_in_it() -> None:
    assert FILE.pull == ()
    assert str(PROJECT_ROOT) not in PREFECT_FILE.read_text()
    text = PREFECT_FILE.read_text().split("definitions:")[1]
    assert not [word for word in text.split() if word.startswith(("/", "'/", '"/'))]


def test_what_is_scheduled_has_all_the_parameters_that_it_needs(
    items: tuple[DeploymentItem, ...],
) -> None:
    for item in items:
        needed = {
            name
            for name, parameter in inspect.signature(item.flow.fn).parameters.items()
            if parameter.default is inspect.Parameter.empty
        }
        if item.entry.schedules:
            assert needed <= set(item.parameters), item.full_name


def test_no_field_of_a_configuration_bears_a_name_that_the_server_drops(
    items: tuple[DeploymentItem, ...],
) -> None:
    """The server checks defaults without the schema's `required`: a field named so goes with it."""

    def fields(schema: object, place: str) -> list[str]:
        if not isinstance(schema, dict):
            return []
        own = [f"{place}.{name}" for name in schema.get("properties", {}) if name == "required"]
        return own + [f for key, inner in schema.items() for f in fields(inner, f"{place}.{key}")]

    for item in items:
        assert fields(item.wanted()["parameter_openapi_schema"], item.full_name) == []


def test_a_further_use_case_has_its_own_names_and_its_own_folder(use_case: UseCase) -> None:
    other = UseCase("other", use_case.config, "/srv/other")
    items = {item.full_name: item for item in deployment_items(FILE, [use_case, other])}
    assert items["training/cpu-other"].job_variables["env"] == {"FALAJ_FEATURE_REPO": "/srv/other"}
    assert items["search/search-other"].job_variables["threads"] == 1
    assert "env" not in items["training/cpu"].job_variables
    assert items["training/cpu-other"].tags == ["falaj", "training", "other"]
    assert "decision/decision" in items
    assert "decision/decision-other" not in items


def file_of(folder: Path, **changes: Any) -> Path:
    """A file with one deployment, whose entry is changed."""
    entry: dict[str, Any] = {
        "name": "cpu",
        "description": "Train.",
        "entrypoint": "flows.training.training_flow",
        "work_pool": {"name": "cpu", "work_queue_name": "retrain"},
        "tags": ["falaj"],
        "parameters": {"config": "{{ prefect.blocks.use-case.first }}"},
        "enforce_parameter_schema": True,
        **changes,
    }
    path = folder / "prefect.yaml"
    content = {"name": "x", "prefect-version": "3", "pull": [], "deployments": [entry]}
    path.write_text(yaml.safe_dump(content))
    return path


CRON = {"slug": "x", "cron": "0 3 * * *"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"entrypoint": "flows/training.py:training_flow"}, "entrypoint: String should match"),
        ({"enforce_parameter_schema": False}, "enforce_parameter_schema: Input should be True"),
        ({"worker_pool": {}}, "worker_pool: Extra inputs are not permitted"),
        ({"schedules": [{**CRON, "cron": "0 25 * * *"}]}, "schedules.0.cron: Invalid cron"),
        (
            {"schedules": [{**CRON, "timezone": "Mars/Base"}]},
            "schedules.0.timezone: Invalid timezone",
        ),
        ({"schedules": [{"cron": "0 3 * * *"}]}, "schedules.0.slug: Field required"),
        ({"schedules": [{**CRON, "active": True}]}, "schedules.0.active: Input should be False"),
        ({"schedules": [CRON, CRON]}, "schedule slug x is there more than once"),
        ({"concurrency_limit": {"limit": 0, "collision_strategy": "ENQUEUE"}}, "limit: Input"),
        ({"description": "{{ $MISSING_NAME }}"}, "variable MISSING_NAME is not set; export it"),
        ({"description": "{{ prefect.variables.x }}"}, "cannot be filled in"),
        (
            {"parameters": {"config": "a {{ prefect.blocks.use-case.first }}"}},
            "cannot be filled in",
        ),
        ({"tags": []}, "tags: Tuple should have at least 1 item"),
    ],
)
def test_a_wrong_entry_is_refused_with_its_place(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        read_prefect_file(file_of(tmp_path, **changes), {})


def test_all_missing_variables_are_told_at_once_and_set_ones_filled_in(tmp_path: Path) -> None:
    path = file_of(tmp_path, description="{{ $ONE }} and {{ $TWO }}", tags=["{{ $THREE }}"])
    with pytest.raises(ConfigurationError) as refused:
        read_prefect_file(path, {"TWO": "2"})
    assert "ONE" in str(refused.value)
    assert "THREE" in str(refused.value)
    assert "TWO" not in str(refused.value)
    file = read_prefect_file(path, {"ONE": "1", "TWO": "2", "THREE": "3"})
    assert file.deployments[0].description == "1 and 2"
    assert file.deployments[0].tags == ("3",)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("a: [", "is no YAML"), ("", "says nothing"), ("- x", "says nothing"), (None, "be read")],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: str | None, sentence: str) -> None:
    path = tmp_path / "prefect.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=sentence):
        read_prefect_file(path, {})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"entrypoint": "flows.training.other_flow"}, "has no flow other_flow"),
        ({"entrypoint": "flows.nowhere.other_flow"}, "No module named 'flows.nowhere'"),
        ({"parameters": {"konfig": 1}}, "there is no parameter konfig"),
        ({"parameters": {"config": {"name": "x"}}}, None),
        ({"parameters": {"config": {"name": 3}}}, "3 is not of type 'string'"),
        ({"schedules": [{**CRON, "parameters": {"config": 1}}]}, "schedule x: .*not of type"),
    ],
)
def test_parameters_that_the_flow_would_refuse_are_refused_here(
    tmp_path: Path, use_case: UseCase, changes: dict[str, Any], sentence: str | None
) -> None:
    file: PrefectFile = read_prefect_file(file_of(tmp_path, **changes), {})
    if sentence is None:  # what is left out, the person who starts the run fills in
        assert deployment_items(file, [use_case])
        return
    with pytest.raises(ConfigurationError, match=sentence):
        deployment_items(file, [use_case])
