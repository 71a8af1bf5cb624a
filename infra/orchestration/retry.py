"""`python -m falaj retry [RUN]`: go on from the stage at which a loop failed or was cut off."""

from __future__ import annotations

import importlib
import time
from typing import Any
from uuid import UUID

import yaml
from prefect import Flow, flow_engine
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import AwaitingRetry, Crashed
from prefect.utilities.urls import url_for

from tasks.control.routing.task import child_error
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import PROJECT_ROOT

LOOPS = ["pipeline", "retraining"]
ENDED_BADLY = [StateType.FAILED, StateType.CRASHED]
CANCELLED = [StateType.CANCELLED]
"""A run that somebody cancelled goes on only when it is named."""
UNFINISHED = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
DEPLOYMENTS = PROJECT_ROOT / "prefect.yaml"
KILLED = "Its process was killed; python -m falaj retry goes on from there."
POLL_S = 1.0
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
        name = client.read_flow(run.flow_id).name
        if run.deployment_id is None:
            flow_engine.run_flow(flow_named(name), flow_run=run)
            return [f"{'Retried':<10}{run.name}, in this process"]
        client.set_flow_run_state(run.id, AwaitingRetry(message="Retry from the command line"))
        return [f"{'Retried':<10}{run.name}, {url_for(run) or run.id}", _wait(client, run)]


def find_run(client: SyncPrefectClient, wanted: str | None) -> FlowRun:
    """The run to retry: by name or the beginning of its id, else the newest loop that ended badly.

    One that was cancelled must be named. For a part that ran in the process of another run, that
    run is found.

    Raises:
        ConfigurationError: there is none, or it is no run that can be retried.
    """
    types = ENDED_BADLY + (CANCELLED if wanted else [])
    ended_badly = FlowRunFilterState(type=FlowRunFilterStateType(any_=types))
    runs = client.read_flow_runs(
        flow_filter=None if wanted else FlowFilter(name=FlowFilterName(any_=LOOPS)),
        flow_run_filter=FlowRunFilter(state=ended_badly),
        sort=FlowRunSort.START_TIME_DESC,
        limit=PAGE,
    )
    for run in runs:
        if wanted is None or run.name == wanted or str(run.id).startswith(wanted):
            found = _run_of_process(client, run)
            if found.state is not None and found.state.type in types:
                return found
    said = f"no run {wanted!r} among" if wanted else "no loop among"
    raise ConfigurationError(
        f"{said} the {len(runs)} newest runs that failed, crashed or were cancelled and did not go "
        "on since; the Prefect UI lists them. Nothing was started"
    )


def _run_of_process(client: SyncPrefectClient, run: FlowRun) -> FlowRun:
    """The run for which a process was started: a part of it cannot go on alone."""
    while run.deployment_id is None and run.parent_task_run_id is not None:
        called_by = client.read_task_run(run.parent_task_run_id).flow_run_id
        if called_by is None:
            return run
        run = client.read_flow_run(called_by)
    return run


def end_lost_runs() -> int:
    """Set Crashed what an earlier command left Running when it was killed; returns how many.

    Only for a server of this process's own: nothing else runs a flow on it.
    """
    with get_client(sync_client=True) as client:
        unfinished = FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED))
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(state=unfinished), limit=PAGE)
        for run in runs:
            client.set_flow_run_state(run.id, Crashed(message=KILLED), force=True)
        steps = TaskRunFilterState(type=TaskRunFilterStateType(any_=UNFINISHED))
        wanted = TaskRunFilter(state=steps)
        for step in client.read_task_runs(task_run_filter=wanted, limit=PAGE):
            client.set_task_run_state(step.id, Crashed(message=KILLED), force=True)
    return len(runs)


def flow_named(name: str) -> Flow[..., Any]:
    """The deployed flow of a name, by its entry point in `prefect.yaml`.

    Raises:
        ConfigurationError: no flow of this name is deployed.
    """
    wanted = f".{name.replace('-', '_')}_flow"
    entries = [str(d["entrypoint"]) for d in yaml.safe_load(DEPLOYMENTS.read_text())["deployments"]]
    entry = next((entry for entry in entries if entry.endswith(wanted)), None)
    if entry is None:
        raise ConfigurationError(
            f"flow {name!r} is not in {DEPLOYMENTS.name}, so this command cannot run it again"
        )
    module, _, attribute = entry.rpartition(".")
    flow: Flow[..., Any] = getattr(importlib.import_module(module), attribute)
    return flow


def _wait(client: SyncPrefectClient, run: FlowRun) -> str:
    """Wait for the end of a deployed run; returns what to tell.

    Raises:
        FalajError: it failed again.
    """
    while True:
        now = client.read_flow_run(UUID(str(run.id)))
        state = now.state
        if state is not None and state.is_final():
            break
        time.sleep(POLL_S)
    if not state.is_completed():
        raise child_error(state.message or state.name or "", f"run {now.name}")
    return f"{'Ended':<10}{state.name}, attempt {now.run_count}"
