"""Deploying flows on process pools, and looking at their runs, from tests."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectAlreadyExists

from infra.bench.parts import wait_until


def deploy(
    client: SyncPrefectClient, flow: Flow[..., Any], name: str, pool: str, **options: Any
) -> UUID:
    """Deploy a flow by its module path on a process pool, which is made where there is none."""
    with suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    where = {"work_pool_name": pool, "pull_steps": [], "parameter_openapi_schema": {}}
    entrypoint = f"{flow.fn.__module__}.{flow.fn.__name__}"
    return client.create_deployment(
        client.create_flow(flow), name, entrypoint=entrypoint, **{**where, **options}
    )


def wait_for_run(
    client: SyncPrefectClient,
    run: UUID,
    condition: Callable[[FlowRun], object],
    what: str,
    limit_s: float = 240,
) -> FlowRun:
    """Poll a run until `condition` holds; the run as it is then."""

    def seen() -> FlowRun | None:
        found = client.read_flow_run(run)
        return found if condition(found) else None

    return wait_until(seen, what, limit_s, pause_s=0.2)


def is_final(run: FlowRun) -> bool:
    """True where a run has ended, however."""
    return run.state is not None and run.state.is_final()
