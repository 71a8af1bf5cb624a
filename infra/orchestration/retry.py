"""`falaj retry [RUN]`: resume at the stage at which a loop failed or was cut off."""

import time
from typing import Any

import yaml
from prefect import Flow, flow_engine
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.flows import load_flow_from_entrypoint
from prefect.states import AwaitingRetry, Crashed
from prefect.utilities.urls import url_for

from tasks.control.routing.task import child_error
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import PROJECT_ROOT

LOOPS = ["pipeline", "retraining"]
ENDED_BADLY = [StateType.FAILED, StateType.CRASHED]
UNFINISHED = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
DEPLOYMENTS = PROJECT_ROOT / "infra" / "deploying" / "prefect.yaml"
KILLED = "Its process was killed; falaj retry resumes it."
PAGE = 200


def retry_run(wanted: str | None) -> list[str]:
    """Retry a run and wait for its end.

    One that a deployment made is scheduled again, as by the button Retry of the Prefect UI, and its
    worker runs it; one of this command line is run in this process. Either way finished stages are
    taken from their stored results.

    Raises:
        ConfigurationError: there is no such run, or nothing of it is left to be done.
        FalajError: it failed again.
    """
    with get_client(sync_client=True) as client:
        run = find_run(client, wanted)
        if run.deployment_id is None:
            flow_engine.run_flow(flow_named(client.read_flow(run.flow_id).name), flow_run=run)
            return [f"{'Retried':<10}{run.name}, in this process"]
        client.set_flow_run_state(run.id, AwaitingRetry(message="Retry from the command line"))
        while (state := (now := client.read_flow_run(run.id)).state) and not state.is_final():
            time.sleep(1.0)
    if state is None or not state.is_completed():
        raise child_error(state.message if state and state.message else "", f"run {now.name}")
    return [
        f"{'Retried':<10}{run.name}, {url_for(run) or run.id}",
        f"{'Ended':<10}{state.name}, attempt {now.run_count}",
    ]


def find_run(client: SyncPrefectClient, wanted: str | None) -> FlowRun:
    """The run to retry: by name or the beginning of its id, else the newest loop that ended badly.

    One that was cancelled must be named. For a part that ran in the process of another run, that
    run is found.

    Raises:
        ConfigurationError: there is none, or it is no run that can be retried.
    """
    types = [*ENDED_BADLY, *([StateType.CANCELLED] if wanted else [])]
    runs = client.read_flow_runs(
        flow_filter=None if wanted else FlowFilter.model_validate({"name": {"any_": LOOPS}}),
        flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": types}}}),
        sort=FlowRunSort.START_TIME_DESC,
        limit=PAGE,
    )
    for run in runs:
        if wanted is None or run.name == wanted or str(run.id).startswith(wanted):
            found = _run_of_process(client, run)
            if found.state is not None and found.state.type in types:
                return found
    raise ConfigurationError(
        f"no run {wanted or 'of a loop'} is among the {len(runs)} newest that failed, crashed or "
        "were cancelled and were not resumed since; the Prefect UI lists them. Nothing was started"
    )


def _run_of_process(client: SyncPrefectClient, run: FlowRun) -> FlowRun:
    """The run for which a process was started: a part of it cannot go on alone."""
    while run.deployment_id is None and run.parent_task_run_id is not None:
        called_by = client.read_task_run(run.parent_task_run_id).flow_run_id
        if called_by is None:
            return run
        run = client.read_flow_run(called_by)
    return run


def end_lost_runs() -> None:
    """Set Crashed what an earlier command left Running when it was killed.

    Only for a server of this process's own: nothing else runs a flow on it.
    """
    wanted = {"state": {"type": {"any_": UNFINISHED}}}
    runs, steps = FlowRunFilter.model_validate(wanted), TaskRunFilter.model_validate(wanted)
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=runs, limit=PAGE):
            client.set_flow_run_state(run.id, Crashed(message=KILLED), force=True)
        for step in client.read_task_runs(task_run_filter=steps, limit=PAGE):
            client.set_task_run_state(step.id, Crashed(message=KILLED), force=True)


def flow_named(name: str) -> Flow[..., Any]:
    """The deployed flow of a name, by its entry point in `prefect.yaml`.

    Raises:
        ConfigurationError: no flow of this name is deployed.
    """
    for entry in yaml.safe_load(DEPLOYMENTS.read_text())["deployments"]:
        if entry["entrypoint"].endswith(f".{name.replace('-', '_')}_flow"):
            return load_flow_from_entrypoint(entry["entrypoint"], use_placeholder_flow=False)
    raise ConfigurationError(
        f"flow {name!r} is not in {DEPLOYMENTS.name}, so this command cannot run it again"
    )
