"""Deploys what tests of the platform need: the pools, and a flow that takes its time.

Run by the platform in place of `infra.deploying`, as a module.
"""

import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from prefect import Flow, flow, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.exceptions import ObjectAlreadyExists

from infra.platform.api import wait_for_server
from tasks.control.routing.task import keep_results

POOLS = ("coordinator", "cpu")


@flow(name="taking-time")
def taking_time_flow(seconds: float) -> None:
    """Be busy for some seconds."""
    time.sleep(seconds)


def main() -> None:
    assert sys.argv[1] == "--wait", sys.argv
    wait_for_server(float(sys.argv[2]))
    keep_results()
    with get_client(sync_client=True) as client:
        for pool in POOLS:
            with suppress(ObjectAlreadyExists):
                client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    monthly = IntervalSchedule(interval=timedelta(days=30))
    module = "tests.support.platform.platform_pools"
    deploy(taking_time_flow, module, schedule=monthly, parameters={"seconds": 0})


def deploy(flow: Flow[..., Any], module: str, **how: Any) -> None:
    """Deploy a flow of a module, which is a program here, to the pool `cpu`."""
    deployment = flow.to_deployment(name="cpu", work_pool_name="cpu", **how)
    deployment.entrypoint = f"{module}.{flow.fn.__name__}"
    deployment.apply()
    sys.stdout.write(f"deployed {flow.name}/cpu\n")


if __name__ == "__main__":
    main()
