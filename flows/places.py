"""What deployments and work pools look like now, read from the Prefect API."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType, Worker
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound

from tasks.control.routing.choice import Place

MISSED_HEARTBEATS = 3
"""A worker that missed so many is gone; the server itself takes longer to say so."""
DEFAULT_HEARTBEAT_S = 30


class Places:
    """The deployments of one flow and use case.

    Args:
        client: of the API.
        flow_name: Prefect's name of the flow.
        suffix: what the use case's deployments have after the class, such as `-houses`.
        use_case: name of the use case.
    """

    def __init__(
        self, client: SyncPrefectClient, flow_name: str, suffix: str, use_case: str
    ) -> None:
        self._client, self._flow, self._suffix = client, flow_name, suffix
        self._use_case = use_case

    def look(self, name: str, hardware_class: str) -> Place:
        """The deployment `<flow>/<name><suffix>` and its pool as they are now."""
        deployment = f"{self._flow}/{name}{self._suffix}"
        try:
            found = self._client.read_deployment_by_name(deployment)
        except ObjectNotFound:
            return Place(deployment, hardware_class, fault="there is no such deployment")
        pool = found.work_pool_name
        if pool is None:
            return Place(deployment, hardware_class, fault="it has no work pool")
        return Place(
            deployment,
            hardware_class,
            pool,
            num_workers_online=self.num_online(pool),
            num_waiting=self._num_waiting(pool),
            fault=self._fault(found, pool),
        )

    def num_online(self, pool: str) -> int:
        """Workers of a pool that sent a heartbeat lately; none where there is no such pool."""
        try:
            workers = self._client.read_workers_for_work_pool(pool)
        except ObjectNotFound:
            return 0
        now = datetime.now(UTC)
        return sum(is_online(worker, now) for worker in workers)

    def pool_of(self, run: FlowRun) -> str | None:
        """Work pool of a run."""
        return run.work_pool_name

    def name_of(self, run: FlowRun) -> str:
        """Deployment of a run, as `<flow>/<name>`."""
        if run.deployment_id is None:
            return "this process"
        return f"{self._flow}/{self._client.read_deployment(run.deployment_id).name}"

    def _fault(self, deployment: DeploymentResponse, pool: str) -> str | None:
        config = deployment.parameters.get("config")
        owner = config.get("name") if isinstance(config, dict) else None
        if owner not in (None, self._use_case):
            return f"it is of use case {owner!r}, not of {self._use_case!r}"
        if deployment.paused:
            return "the deployment is paused"
        if self._client.read_work_pool(pool).is_paused:
            return f"work pool {pool!r} is paused"
        return None

    def _num_waiting(self, pool: str) -> int:
        """Runs of a pool that should have begun and have not."""
        due = FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
            expected_start_time=FlowRunFilterExpectedStartTime.model_validate(
                {"before_": datetime.now(UTC)}
            ),
        )
        return self._client.count_flow_runs(
            flow_run_filter=due,
            work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
        )


def is_online(worker: Worker, now: datetime) -> bool:
    """True where a worker's last heartbeat is recent."""
    if worker.last_heartbeat_time is None:
        return False
    interval_s = worker.heartbeat_interval_seconds or DEFAULT_HEARTBEAT_S
    return now - worker.last_heartbeat_time < timedelta(seconds=MISSED_HEARTBEATS * interval_s)
