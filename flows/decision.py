"""Decide: answer a drift result - nothing, retrain, recalibrate or roll back - and do it, once.

Rule: where a deployment of the flow (`pipeline` to retrain, `recalibration` to recalibrate) has the
order's use case, it is started. The incident is its idempotency key, so that a second start gives
the same run. Where neither flow has a deployment, it runs in this process. Where only the
loop has one, nothing here recalibrates, and the controller knows so before it decides. Rolling
back moves an alias, always in this process.

Platforms that share a metadata database have servers of their own, which know nothing of each
other's keys and runs: a claim is reserved for one of them, and only that one learns how it ended.
"""

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from uuid import UUID

import httpx
from prefect import Flow, flow, get_client, runtime
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.flows import load_flow_from_entrypoint
from prefect.logging import get_run_logger
from pydantic import BaseModel

from flows.config import PipelineConfig, read_pipeline_config
from flows.stages import FOUND, found_but_not_retried, moment_of_run, roll
from tasks.control.retraining.decision import Action
from tasks.control.retraining.incidents import LOST, note_ends, start_claimed
from tasks.control.retraining.ledger import Ledger
from tasks.control.retraining.records import Answer, ClaimState, Mode, Order, RunEnd, StartedAction
from tasks.control.retraining.task import (
    answer_drift_result,
    find_unsettled,
    read_drift_result,
    settle_drift_results,
)
from tasks.kernel.errors import ConfigurationError, RegistryError, SignatureError, TransientError
from tasks.kernel.files import machine_id
from tasks.kernel.process import ProcessName
from tasks.kernel.settings import Settings
from tasks.registry.task import find_champion_state, roll_back

PIPELINE, RECALIBRATION = "pipeline", "recalibration"
ENTRY_POINTS = {
    PIPELINE: "flows.pipeline.pipeline_flow",
    RECALIBRATION: "flows.recalibration.recalibration_flow",
}
"""Loaded when one of them runs in this process: they import all of training and conversion."""
QUEUE = "retrain"
TAG = "falaj:retraining"


def decision_run_name() -> str:
    """Name of a run: the beginning of the result's digest."""
    return f"decide-{str(runtime.flow_run.parameters.get('result_id'))[:12]}"


@flow(name="decision", flow_run_name=decision_run_name, **FOUND)
def decision_flow(result_id: str, mode: Mode = "act") -> Answer:
    """Answer one drift result, and all of its model that were stored before it and have no answer.

    Args:
        result_id: As the event `falaj.drift.judged` names it.
        mode: `decide_only` records what would be done, and does nothing.

    Raises:
        DataContractError: there is no such result.
        ConfigurationError: nothing on this platform retrains its use case; the claim stays, and
            the sweep tries again.
    """
    result = read_drift_result(result_id)
    recalibrates = can_recalibrate(result.use_case)
    answer = answer_drift_result(result, find_champion_state(result.model), mode, recalibrates)
    FlowStarter(Settings.from_environment()).start_all(answer.orders)
    return answer


def advise_on_drift(model: str, use_case: str) -> Answer | None:
    """Record what the controller would do about a model's newest drift results, and do nothing.

    For a flow that has just checked drift and ends there, such as the loop of `make run`. Where the
    controller is deployed it answers itself, and advice here would take its question away: None.
    """
    if deployments_of(decision_flow.name):
        return None
    return settle_drift_results(model, use_case, find_champion_state(model), "decide_only")


@flow(name="retraining-sweep", **found_but_not_retried("its next run by schedule does the same"))
def retraining_sweep_flow() -> list[Answer]:
    """Bring the controller's table and the world together; nothing happens where both agree.

    Runs that ended are noted first, so that what waited for them is decided with that known.
    """
    starter = FlowStarter(Settings.from_environment())
    starter.note_ends()
    answers = [
        settle_drift_results(
            model, use_case, find_champion_state(model), recalibrates=can_recalibrate(use_case)
        )
        for model, use_case in find_unsettled()
    ]
    starter.start_left()
    return answers


class FlowStarter:
    """Starts what the controller ordered, and learns how it ended.

    Args:
        settings: of this installation; names the controller's database.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ledger = Ledger(settings.metadata_url)

    def start_all(self, orders: Sequence[Order]) -> None:
        """Start what was claimed; a failed start is noted, and raised after the others."""
        start_claimed(self._ledger, orders, self.start)

    def start_left(self) -> None:
        """Start all claims that nobody has started: those of killed processes."""
        self.start_all([claim.order for claim in self._ledger.claims(ClaimState.CLAIMED)])

    def note_ends(self) -> int:
        """Note the end of each run that has ended; returns how many that were."""
        return note_ends(self._ledger, self.end)

    def start(self, order: Order) -> StartedAction | None:
        """Start one action; see `start_claimed`."""
        if order.action is Action.ROLL_BACK:
            return self._roll_back(order)
        deployment = deployment_for(_flow_for(order), order.use_case)
        if deployment is None:
            return self._run_here(order)
        place = f"{_flow_for(order)}/{deployment.name} {deployment.id}"
        if not self._ledger.reserve(order.incident_id, place):
            return None
        return StartedAction(
            kind="deployment", run_id=str(_run_there(order, deployment)), place=place
        )

    def end(self, order: Order, started: StartedAction) -> RunEnd | None:
        """How a run ended; see `note_ends`."""
        if started.kind == "in_process":
            return None if _may_live(started.place) else RunEnd(state=LOST, seconds=None)
        with _answering_api(), get_client(sync_client=True) as client:
            try:
                run = client.read_flow_run(UUID(started.run_id))
            except ObjectNotFound:
                here = _has_deployment(client, started.place)
                return RunEnd(state="deleted", seconds=None) if here else None
        if run.state is None or not run.state.is_final():
            return None
        state = run.state.type.value.lower()
        return RunEnd(state=state, seconds=run.total_run_time.total_seconds())

    def _roll_back(self, order: Order) -> StartedAction:
        """Move the alias back; what the registry refuses is the end of it, and is kept."""
        here = _this_process()
        state, trouble = "completed", None
        try:
            roll_back(order.model, order.version, order.reason, order.incident_id)
        except (RegistryError, SignatureError) as exc:
            state, trouble = "refused", str(exc)
            get_run_logger().error("%s", exc)
        self._ledger.mark_started(order.incident_id, here)
        self._ledger.mark_ended(order.incident_id, RunEnd(state=state, seconds=None), trouble)
        return here

    def _run_here(self, order: Order) -> StartedAction | None:
        """Run the flow in this process; the sweep takes it up again should it be killed."""
        config = read_pipeline_config(self._settings.feature_repo)
        if config.name != order.use_case:
            raise ConfigurationError(
                f"{order.action} of {order.model}, use case {order.use_case!r}: neither a "
                f"deployment of {_flow_for(order)!r} does that nor the feature repository here, "
                f"which is of {config.name!r}; deploy it, or set FALAJ_FEATURE_REPO. Its claim "
                "stays"
            )
        here = _this_process()
        if not self._ledger.mark_started(order.incident_id, here):
            return None  # another process took it in between
        began = time.monotonic()
        flow: Flow[..., Any] = load_flow_from_entrypoint(
            ENTRY_POINTS[_flow_for(order)], use_placeholder_flow=False
        )
        state = cast(State[Any], flow(**_parameters(order, config), return_state=True))
        end = RunEnd(state=state.type.value.lower(), seconds=time.monotonic() - began)
        self._ledger.mark_ended(order.incident_id, end, state.message)
        return here


def _flow_for(order: Order) -> str:
    return RECALIBRATION if order.action is Action.RECALIBRATE else PIPELINE


def _parameters(order: Order, config: PipelineConfig) -> dict[str, BaseModel]:
    """The loop on the newest days, or a recalibration on the window that was judged."""
    if order.action is Action.RECALIBRATE:
        return {"window": order.evidence.window, "config": config}
    return {"config": roll(config, moment_of_run())}


def _run_there(order: Order, deployment: DeploymentResponse) -> UUID:
    """Start the flow's deployment; the same order gives the same run."""
    config = PipelineConfig.model_validate(deployment.parameters["config"])
    return start_run(
        deployment.id,
        {n: v.model_dump(mode="json") for n, v in _parameters(order, config).items()},
        key=order.incident_id,
        work_queue_name=QUEUE if deployment.work_pool_name else None,
        tags=[TAG, f"falaj:episode:{order.incident_id[:12]}"],
    ).id


def _has_deployment(client: SyncPrefectClient, place: str) -> bool:
    """True where a place is of this platform: an id is that of one server alone.

    Earlier releases noted none, so of theirs nothing else is known.
    """
    _, _, deployment = place.partition(" ")
    if not deployment:
        return True
    try:
        client.read_deployment(UUID(deployment))
    except ObjectNotFound:
        return False
    return True


def start_run(
    deployment: UUID | str, parameters: dict[str, Any], *, key: str, **how: Any
) -> FlowRun:
    """Start a run that goes on when this flow has ended; the same key gives the same run.

    Args:
        deployment: its id, or its name with that of its flow.
        parameters: plain values.
        key: of the run.
        how: more of what Prefect's `run_deployment` takes.

    Raises:
        TransientError: the API does not answer.
    """
    with _answering_api():
        how |= {"timeout": 0, "idempotency_key": key, "as_subflow": False}
        started = run_deployment(deployment, parameters=parameters, **how)
    return cast(FlowRun, started)


def deployments_of(flow_name: str) -> list[DeploymentResponse]:
    """All deployments of a flow.

    Raises:
        TransientError: the API does not answer.
    """
    with _answering_api(), get_client(sync_client=True) as client:
        return client.read_deployments(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[flow_name])), limit=200
        )


def can_recalibrate(use_case: str) -> bool:
    """True where a recalibration has a deployment of this use case, or all runs in this process.

    Raises:
        TransientError: the API does not answer.
    """
    found = deployments_of(RECALIBRATION)
    if found:
        return any(_use_case_of(deployment) == use_case for deployment in found)
    return not deployments_of(PIPELINE)


def deployment_for(flow_name: str, use_case: str) -> DeploymentResponse | None:
    """The flow's deployment with this use case's configuration; None where the flow has none.

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
            "Nothing was started, and what asked for it stays; deploy it with "
            "`falaj deploy`"
        )
    return min(fitting, key=lambda d: (not d.name.startswith(flow_name), d.name), default=None)


def _use_case_of(deployment: DeploymentResponse) -> str | None:
    config = deployment.parameters.get("config")
    return config.get("name") if isinstance(config, dict) else None


def _this_process() -> StartedAction:
    mine = ProcessName.of_this()
    machine = machine_id(Settings.from_environment().home)
    place = f"{socket.gethostname()} {mine.boot} {mine.space} {machine} {mine.pid} {mine.start}"
    return StartedAction(kind="in_process", run_id=str(runtime.flow_run.id), place=place)


def _may_live(place: str) -> bool:
    """False where the process is known to be gone: of this machine, and not running any more."""
    host, boot, *more, pid, start = place.split()
    if host != socket.gethostname():
        return True
    mine = ProcessName.of_this()
    here = [mine.space, machine_id(Settings.from_environment().home)]
    space, machine = [*more, *here[len(more) :]]  # earlier releases noted neither
    process = ProcessName(boot=boot, space=space, pid=int(pid), start=int(start))
    if not process.is_visible_to(mine):
        return process.boot == mine.boot or machine != here[1]
    return not process.has_ended()


@contextmanager
def _answering_api() -> Iterator[None]:
    """Turn what the Prefect client raises where the API does not answer into a `TransientError`."""
    try:
        yield
    except httpx.HTTPError as exc:
        raise TransientError(
            f"the Prefect API did not answer as expected ({exc}). Nothing was started; the "
            "controller's claim stays, and the sweep tries again"
        ) from exc
