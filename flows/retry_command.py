"""`python -m flows retry [RUN]`: go on from the stage at which a loop failed or was cut off."""

from __future__ import annotations

import argparse
import importlib
import time
from typing import Any
from uuid import UUID

from prefect import Flow, flow_engine
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import AwaitingRetry, Crashed
from prefect.utilities.urls import url_for

from flows.routing import child_error
from tasks.errors import ConfigurationError

LOOP = "pipeline"
ENDED_BADLY = [StateType.FAILED, StateType.CRASHED]
CANCELLED = [StateType.CANCELLED]
"""A run that somebody cancelled goes on only when it is named."""
UNFINISHED = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
FLOWS = {
    "pipeline": "flows.pipeline.pipeline_flow",
    "feature-refresh": "flows.feature_refresh.feature_refresh_flow",
    "training": "flows.training.training_flow",
    "conversion": "flows.conversion.conversion_flow",
    "reconversion": "flows.reconversion.reconversion_flow",
    "promotion": "flows.promotion.promotion_flow",
    "drift-check": "flows.drift_check.drift_check_flow",
    "drift-check-log": "flows.drift_check.drift_check_log_flow",
    "search": "flows.search.search_flow",
    "model-import": "flows.model_import.model_import_flow",
}
POLL_S = 1.0
PAGE = 200


def retry_run(options: argparse.Namespace) -> list[str]:
    """Retry a run and wait for its end.

    One that a deployment made is scheduled again, as by the button Retry of the Prefect UI, and its
    worker runs it; one of this command line is run in this process. Either way finished stages are
    taken from their stored results.

    Raises:
        ConfigurationError: there is no such run, or nothing of it is left to be done.
        FalajError: it failed again.
    """
    with get_client(sync_client=True) as client:
        run = find_run(client, options.run)
        name = client.read_flow(run.flow_id).name
        if run.deployment_id is None:
            _run_here(run, name)
            return [f"{'Retried':<10}{run.name}, in this process"]
        client.set_flow_run_state(run.id, AwaitingRetry(message="Retry from the command line"))
        return [f"{'Retried':<10}{run.name}, {url_for(run) or run.id}", _wait(client, run)]


def find_run(client: SyncPrefectClient, wanted: str | None) -> FlowRun:
    """The run to retry: by name or the beginning of its id, else the newest loop that ended badly.

    One that was cancelled must be named.

    Raises:
        ConfigurationError: there is none, or it is no run that can be retried.
    """
    types = ENDED_BADLY + (CANCELLED if wanted else [])
    ended_badly = FlowRunFilterState(type=FlowRunFilterStateType(any_=types))
    runs = client.read_flow_runs(
        flow_filter=None if wanted else FlowFilter(name=FlowFilterName(any_=[LOOP])),
        flow_run_filter=FlowRunFilter(state=ended_badly),
        sort=FlowRunSort.START_TIME_DESC,
        limit=PAGE,
    )
    for run in runs:
        if wanted is None or run.name == wanted or str(run.id).startswith(wanted):
            return run
    said = f"no run {wanted!r} among" if wanted else "no loop among"
    raise ConfigurationError(
        f"{said} the {len(runs)} newest runs that failed, crashed or were cancelled; the Prefect "
        "UI lists them. Nothing was started"
    )


def end_lost_runs() -> int:
    """Set Crashed what an earlier command left Running when it was killed; returns how many.

    Only for a server of this process's own: nothing else runs a flow on it.
    """
    with get_client(sync_client=True) as client:
        unfinished = FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED))
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(state=unfinished), limit=PAGE)
        for run in runs:
            message = "Its process was killed; python -m flows retry goes on from there."
            client.set_flow_run_state(run.id, Crashed(message=message), force=True)
    return len(runs)


def _run_here(run: FlowRun, name: str) -> None:
    """Run an earlier run's next attempt in this process.

    Raises:
        ConfigurationError: it is a stage of a loop, or no flow of this project.
    """
    if run.parent_task_run_id is not None:
        raise ConfigurationError(
            f"{run.name} is a stage of a loop that ran in one process; retry the loop instead: "
            "python -m flows retry"
        )
    if name not in FLOWS:
        raise ConfigurationError(f"{run.name} is of flow {name!r}, which this command cannot run")
    module, _, attribute = FLOWS[name].rpartition(".")
    flow: Flow[..., Any] = getattr(importlib.import_module(module), attribute)
    flow_engine.run_flow(flow, flow_run=run)


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
