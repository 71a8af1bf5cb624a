"""Deploys what tests of the platform need: the pools, and a flow that takes its time.

Run by the platform in place of `infra.deploying`, as a module.
"""

import sys
import time
from datetime import timedelta

from prefect import flow, get_client
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
            try:
                client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
            except ObjectAlreadyExists:
                sys.stdout.write(f"pool {pool} is there\n")
    deployment = taking_time_flow.to_deployment(
        name="cpu",
        work_pool_name="cpu",
        schedule=IntervalSchedule(interval=timedelta(days=30)),
        parameters={"seconds": 0},
    )
    deployment.entrypoint = "tests.support.platform.platform_pools.taking_time_flow"
    deployment.apply()
    sys.stdout.write("deployed taking-time/cpu\n")


if __name__ == "__main__":
    main()
