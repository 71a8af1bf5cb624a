"""`prefect.yaml`: what is wrong in it is found before anything is deployed."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.stages import note_process
from infra.deploying.deployments import deployment_items, load_flow
from infra.deploying.file import (
    PREFECT_FILE,
    Deployment,
    UseCase,
    read_pools_file,
    read_prefect_file,
    read_use_cases,
)
from infra.orchestration.retry import flow_named
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import DEFAULT_FEATURE_REPO, PROJECT_ROOT

FILE = read_prefect_file()
COORDINATORS = ("pipeline_flow", "search_flow", "retraining_flow")


@pytest.fixture(scope="module")
def use_case() -> UseCase:
    [found] = read_use_cases([str(PROJECT_ROOT / DEFAULT_FEATURE_REPO)])
    return found


@pytest.mark.parametrize("entry", FILE.deployments, ids=lambda d: f"{d.entrypoint} on {d.name}")
def test_every_deployment_names_a_flow_that_is_found_when_lost_and_can_be_retried(
    entry: Deployment,
) -> None:
    flow, pool = load_flow(entry.entrypoint), entry.work_pool.name
    assert inspect.getdoc(flow.fn)
    assert flow.persist_result
    assert entry.name == (flow.name if pool == "coordinator" else pool)
    assert "falaj" in entry.tags
    assert note_process in flow.on_running_hooks
    assert flow_named(flow.name) is flow
    # What waits for stages would hold the slots that they wait for.
    assert (pool == "coordinator") >= entry.entrypoint.endswith(COORDINATORS)


def test_a_run_that_was_cut_off_is_started_again_but_for_flows_that_give_their_reason() -> None:
    flows = {load_flow(entry.entrypoint) for entry in FILE.deployments}
    assert {f.name for f in flows if "note_why" in {h.__name__ for h in f.on_running_hooks}} == {
        "approval",
        "retraining-sweep",
        "recovery-sweep",
        "release-by-hand",
    }


def test_every_flow_is_deployed() -> None:
    written = {
        f"flows.{file.stem}.{name}"
        for file in (PROJECT_ROOT / "flows").glob("*.py")
        for name in re.findall(r"^def ([a-z]\w*_flow)\(", file.read_text(), re.MULTILINE)
    }
    assert {entry.entrypoint for entry in FILE.deployments} == written


def test_every_pool_and_queue_of_the_file_is_made_and_no_path_of_a_machine_is_in_it() -> None:
    pools = read_pools_file()
    for kind in (pools.process, pools.kubernetes):
        assert {entry.work_pool.name for entry in FILE.deployments} <= set(kind)
    assert {entry.work_pool.work_queue_name for entry in FILE.deployments} <= set(pools.queues)
    text = PREFECT_FILE.read_text().split("definitions:")[1]
    assert not [word for word in text.split() if word.startswith(("/", "'/", '"/'))]


def test_what_is_scheduled_has_all_the_parameters_that_it_needs(use_case: UseCase) -> None:
    for item in deployment_items(FILE, [use_case]):
        needed = {
            name
            for name, parameter in inspect.signature(item.flow.fn).parameters.items()
            if parameter.default is inspect.Parameter.empty
        }
        assert not item.entry.schedules or needed <= set(item.parameters), item.full_name


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
    ("changes", "place"),
    [
        ({"entrypoint": "flows/training.py:training_flow"}, "entrypoint"),
        ({"enforce_parameter_schema": False}, "enforce_parameter_schema"),
        ({"worker_pool": {}}, "worker_pool"),
        ({"schedules": [{**CRON, "cron": "0 25 * * *"}]}, r"schedules\.0\.cron"),
        ({"schedules": [{**CRON, "timezone": "Mars/Base"}]}, r"schedules\.0\.timezone"),
        ({"schedules": [{"cron": "0 3 * * *"}]}, r"schedules\.0\.slug"),
        ({"schedules": [CRON, CRON]}, "x is there more than once"),
        ({"description": "{{ $NAME }}"}, "NAME .*cannot be filled in"),
        ({"parameters": {"config": "a {{ prefect.blocks.use-case.first }}"}}, "cannot be filled"),
        ({"tags": []}, "tags"),
    ],
)
def test_a_wrong_entry_is_refused_with_its_place(
    tmp_path: Path, changes: dict[str, Any], place: str
) -> None:
    with pytest.raises(ConfigurationError, match=place):
        read_prefect_file(file_of(tmp_path, **changes))


@pytest.mark.parametrize("content", ["a: [", "", "- x"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prefect.yaml"
    path.write_text(content)
    for file in (path, tmp_path / "absent" / "prefect.yaml"):
        with pytest.raises(ConfigurationError, match=r"prefect\.yaml"):
            read_prefect_file(file)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"entrypoint": "flows.training.other_flow"}, "other_flow"),
        ({"entrypoint": "flows.nowhere.other_flow"}, "No module named 'flows.nowhere'"),
        ({"parameters": {"konfig": 1}}, "there is no parameter konfig"),
        ({"parameters": {"config": {"name": "x"}}}, None),
        ({"parameters": {"config": {"name": 3}}}, "3 is not of type 'string'"),
    ],
)
def test_parameters_that_the_flow_would_refuse_are_refused_here(
    tmp_path: Path, use_case: UseCase, changes: dict[str, Any], sentence: str | None
) -> None:
    file = read_prefect_file(file_of(tmp_path, **changes))
    if sentence is None:  # what is left out, the person who starts the run fills in
        assert deployment_items(file, [use_case])
        return
    with pytest.raises(ConfigurationError, match=sentence):
        deployment_items(file, [use_case])
