"""How the governor's orders become runs: by deployment on a platform, in process without one.

Rule: where a deployment of the flow `pipeline` has the order's use case, it is started, with the
episode as its idempotency key, so that a second start gives the same run. Where the flow has no
deployment, the loop runs in this process. Rolling back moves an alias, always in this process.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast
from uuid import UUID

import httpx
from prefect import get_client, runtime
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger

from flows.clock import roll
from flows.config import PipelineConfig, read_pipeline_config
from flows.windows import moment_of_run
from tasks.errors import ConfigurationError, RegistryError, TransientError
from tasks.governor.acting import LOST, note_ends, start_claimed
from tasks.governor.decision import Action
from tasks.governor.ledger import Ledger
from tasks.governor.records import ClaimState, Order, RunEnd, StartedAction
from tasks.recovery.processes import boot_id, started_at
from tasks.registry.task import roll_back
from tasks.settings import Settings

PIPELINE, COORDINATOR, QUEUE = "pipeline", "coordinator", "retrain"
TAG = "falaj:governor"
MAX_DEPLOYMENTS = 200


class FlowStarter:
    """Starts what the governor ordered, and learns how it ended.

    Args:
        settings: of this installation; names the governor's database.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ledger = Ledger(settings.operation_url)

    def start_all(self, orders: Sequence[Order]) -> None:
        """Start what was claimed; a failed start is noted, and raised after the others."""
        start_claimed(self._ledger, orders, self)

    def start_left(self) -> None:
        """Start all claims that nobody has started: those of killed processes."""
        left = self._ledger.claims(ClaimState.CLAIMED)
        self.start_all([claim.order for claim in left])

    def note_ends(self) -> int:
        """Note the end of each run that has ended; returns how many that were."""
        return note_ends(self._ledger, self)

    def start(self, order: Order) -> StartedAction:
        """Start one action; see `tasks.governor.acting.Starter`."""
        if order.action is Action.ROLL_BACK:
            return self._roll_back(order)
        deployment = deployment_for(PIPELINE, order.use_case)
        return self._run_here(order) if deployment is None else _run_there(order, deployment)

    def end(self, order: Order, started: StartedAction) -> RunEnd | None:
        """How a run ended; see `tasks.governor.acting.Starter`."""
        if started.kind == "in_process":
            return None if _may_live(started.place) else RunEnd(state=LOST, seconds=None)
        try:
            with _answering_api(), get_client(sync_client=True) as client:
                run = client.read_flow_run(UUID(started.run_id))
        except ObjectNotFound:
            return RunEnd(state="deleted", seconds=None)
        if run.state is None or not run.state.is_final():
            return None
        state = run.state.type.value.lower()
        return RunEnd(state=state, seconds=run.total_run_time.total_seconds())

    def _roll_back(self, order: Order) -> StartedAction:
        """Move the alias back; what the registry refuses is the end of it, and is kept."""
        here = _this_process()
        state, trouble = "completed", None
        try:
            roll_back(order.model, order.version, order.reason, order.episode_id)
        except RegistryError as exc:
            state, trouble = "refused", str(exc)
            get_run_logger().error("%s", exc)
        self._ledger.mark_started(order.episode_id, here)
        self._ledger.mark_ended(order.episode_id, RunEnd(state=state, seconds=None), trouble)
        return here

    def _run_here(self, order: Order) -> StartedAction:
        """Run the loop in this process; the sweep takes it up again should it be killed."""
        from flows.pipeline import pipeline_flow

        config = read_pipeline_config(self._settings.feature_repo)
        if config.name != order.use_case:
            raise ConfigurationError(
                f"{order.model} of use case {order.use_case!r} is to be retrained, and neither a "
                f"deployment of {PIPELINE!r} does that nor the feature repository here, which is "
                f"of {config.name!r}; deploy it, or set FALAJ_FEATURE_REPO. Its claim stays"
            )
        here = _this_process()
        if not self._ledger.mark_started(order.episode_id, here):
            return here  # another process took it in between
        began = time.monotonic()
        state = pipeline_flow(roll(config, moment_of_run()), return_state=True)
        end = RunEnd(state=state.type.value.lower(), seconds=time.monotonic() - began)
        self._ledger.mark_ended(order.episode_id, end, state.message)
        return here


def _run_there(order: Order, deployment: DeploymentResponse) -> StartedAction:
    """Start the loop's deployment on the newest days; the same order gives the same run."""
    config = roll(PipelineConfig.model_validate(deployment.parameters["config"]), moment_of_run())
    run = start_run(
        deployment,
        {"config": config.model_dump(mode="json")},
        key=order.episode_id,
        queue=QUEUE if deployment.work_pool_name else None,
        tags=[TAG, f"falaj:episode:{order.episode_id[:12]}"],
    )
    place = f"{PIPELINE}/{deployment.name}"
    return StartedAction(kind="deployment", run_id=str(run.id), place=place)


def start_run(
    deployment: DeploymentResponse,
    parameters: dict[str, object],
    *,
    key: str,
    queue: str | None,
    tags: list[str],
) -> FlowRun:
    """Start a run that goes on when this flow has ended; the same key gives the same run.

    Raises:
        TransientError: the API does not answer.
    """
    with _answering_api():
        started = run_deployment(
            deployment.id,
            parameters=parameters,
            timeout=0,
            idempotency_key=key,
            as_subflow=False,
            work_queue_name=queue,
            tags=tags,
        )
    return cast(FlowRun, started)


def deployments_of(flow_name: str) -> list[DeploymentResponse]:
    """All deployments of a flow.

    Raises:
        TransientError: the API does not answer.
    """
    with _answering_api(), get_client(sync_client=True) as client:
        return client.read_deployments(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[flow_name])), limit=MAX_DEPLOYMENTS
        )


def deployment_for(flow_name: str, use_case: str) -> DeploymentResponse | None:
    """The deployment of a flow with this use case's configuration; None where it has none at all.

    Raises:
        ConfigurationError: the flow is deployed, for other use cases alone.
        TransientError: the API does not answer.
    """
    found = deployments_of(flow_name)
    fitting = [d for d in found if _use_case_of(d) == use_case]
    if found and not fitting:
        known = ", ".join(sorted(f"{d.name} ({_use_case_of(d)})" for d in found))
        raise ConfigurationError(
            f"no deployment of {flow_name!r} is of use case {use_case!r}; there are {known}. "
            "Nothing was started, and it is tried again; deploy it with python -m infra.deploying"
        )
    return min(fitting, key=lambda d: (not d.name.startswith(COORDINATOR), d.name), default=None)


def _use_case_of(deployment: DeploymentResponse) -> str | None:
    config = deployment.parameters.get("config")
    return config.get("name") if isinstance(config, dict) else None


def _this_process() -> StartedAction:
    place = f"{socket.gethostname()} {boot_id()} {os.getpid()} {started_at(os.getpid())}"
    return StartedAction(kind="in_process", run_id=str(runtime.flow_run.id), place=place)


def _may_live(place: str) -> bool:
    """False where the process is known to be gone: of this host, and not running any more."""
    host, boot, pid, began = place.split()
    if host != socket.gethostname():
        return True
    return boot == boot_id() and str(started_at(int(pid))) == began


@contextmanager
def _answering_api() -> Iterator[None]:
    """Turn what the Prefect client raises where the API does not answer into a `TransientError`."""
    try:
        yield
    except ObjectNotFound:
        raise
    except httpx.HTTPError as exc:
        raise TransientError(
            f"the Prefect API did not answer the governor as expected ({exc}). Nothing was "
            "started, the claim stays, and the sweep tries again"
        ) from exc
