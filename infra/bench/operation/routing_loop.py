"""The measured side of `infra.bench.operation.routing`: an idle stage, called in three ways."""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

import flows.pipeline  # noqa: F401  what a real stage's process imports
from flows.stages import RECORDED, Stages
from tasks.contracts.base import TimeWindow
from tasks.control.routing.config import RoutingConfig, StageRouting
from tasks.kernel.settings import ArtifactStore, Settings

WAIT_S = 300


def same_window(window: TimeWindow) -> TimeWindow:
    """The stage's body."""
    return window


@flow(name="bench-stage", **RECORDED)
def stage_flow(window: TimeWindow) -> TimeWindow:
    """Give back what it is given."""
    return same_window(window)


@flow(name="bench-loop")
def loop_flow(windows: list[TimeWindow]) -> dict[str, list[float]]:
    """Call the stage for each window in each way; seconds by way."""
    store: ArtifactStore = Settings.from_environment().store
    patient = StageRouting(wait_s=WAIT_S)
    here = Stages("bench", RoutingConfig(mode="in process"), store)
    pool = Stages("bench", RoutingConfig(mode="deployments", training=patient), store)
    taken: dict[str, list[float]] = {"plain": [], "here": [], "pool": []}
    # The first of each is not counted: it imports, and waits until the worker is online.
    pool.run("training", stage_flow, windows[0])
    here.run("training", stage_flow, windows[0])
    for window in windows[1:]:
        moments = [time.monotonic()]
        same_window(window)
        moments.append(time.monotonic())
        here.run("training", stage_flow, window)
        moments.append(time.monotonic())
        pool.run("training", stage_flow, window)
        moments.append(time.monotonic())
        for seconds, (began, ended) in zip(taken.values(), pairwise(moments), strict=True):
            seconds.append(ended - began)
    return taken


def deploy(pool: str) -> None:
    """Make the stage's deployment."""
    with get_client(sync_client=True) as client:
        deadline = time.monotonic() + WAIT_S
        while not any(p.name == pool for p in client.read_work_pools()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the worker has not made pool {pool} within {WAIT_S} s")
            time.sleep(0.5)
        client.create_deployment(
            flow_id=client.create_flow(stage_flow),
            name="cpu",
            work_pool_name=pool,
            entrypoint="infra.bench.operation.routing_loop.stage_flow",
            pull_steps=[],
        )


def main(pool: str, rounds: int) -> None:
    """Measure and print the seconds as one line of JSON, the last."""
    deploy(pool)
    windows = [
        TimeWindow.model_validate(
            {"start": f"2013-01-{n + 1:02d}T00:00Z", "end": "2013-03-01T00:00Z"}
        )
        for n in range(rounds + 1)
    ]
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        print(json.dumps(loop_flow(windows)))


if __name__ == "__main__":
    # Under the name by which the worker imports it: the flows must be the same ones.
    from infra.bench.operation import routing_loop

    assert Path(routing_loop.__file__) == Path(__file__)
    routing_loop.main(sys.argv[1], int(sys.argv[2]))
