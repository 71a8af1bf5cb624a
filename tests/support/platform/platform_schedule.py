"""Deploys pools and a flow that runs each minute.

Run by the platform in place of `infra.deploying`, as a module.

Like the project's sweeps it has one run at a time, and drops what is late.
"""

from prefect import flow
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.client.schemas.schedules import CronSchedule

from tests.support.platform import platform_pools


@flow(name="each-minute")
def each_minute_flow() -> None:
    """Do nothing, and be seen."""


def main() -> None:
    platform_pools.main()
    one = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
    module, each_minute = "tests.support.platform.platform_schedule", CronSchedule(cron="* * * * *")
    platform_pools.deploy(each_minute_flow, module, schedule=each_minute, concurrency_limit=one)


if __name__ == "__main__":
    main()
