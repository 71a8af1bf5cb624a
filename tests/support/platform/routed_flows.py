"""Small flows with real deployments and workers: a loop of two stages that write a journal.

A stage waits for, or fails without, a file, so that a test decides when what happens.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from pydantic import BaseModel, ConfigDict

from flows.stages import FOUND, Stages
from tasks.contracts.base import Contract
from tasks.contracts.run import StageTime
from tasks.control.config import RoutingConfig
from tasks.kernel import guard
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore
from tests.support.platform.deployed import deploy


class LoopConfig(BaseModel):
    """What the loop is asked to do; files that steer it lie in `folder`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "routed"
    folder: str
    routing: RoutingConfig = RoutingConfig()

    @property
    def path(self) -> Path:
        return Path(self.folder)


class Number(Contract):
    value: int
    digits: tuple[str, ...]


class LoopResult(Contract):
    first: Number
    second: tuple[Number, ...]
    stages: tuple[StageTime, ...]


def note(config: LoopConfig, what: str) -> None:
    with (config.path / "journal").open("a") as journal:
        journal.write(f"{what} {os.getpid()}\n")


@flow(name="routed-first", **FOUND)
def first_flow(number: int, config: LoopConfig) -> Number:
    """Double a number."""
    note(config, "first")
    return Number(value=2 * number, digits=tuple(str(2 * number)))


@flow(name="routed-second", **FOUND)
def second_flow(first: Number, config: LoopConfig) -> tuple[Number, ...]:
    """Fail without the file `allowed`; with the file `slow`, start processes and wait."""
    note(config, "second")
    if (config.path / "slow").exists():
        sleeper = [sys.executable, "-c", f"import time; time.sleep(900) # {config.folder}"]
        line = [sys.executable, "-S", guard.__file__, str(os.getpid()), "2", "--", *sleeper]
        with subprocess.Popen(line) as sleeping:
            while not (config.path / "enough").exists():
                time.sleep(0.1)
            sleeping.terminate()
        return ()
    if not (config.path / "allowed").exists():
        raise DataContractError("column distance has 3 nulls; nothing was trained")
    return (first, Number(value=1, digits=("1",)))


@flow(name="routed-loop", **FOUND)
def loop_flow(config: LoopConfig) -> LoopResult:
    """Both stages, here or on work pools."""
    note(config, "loop")
    stages = Stages(config.name, config.routing, ArtifactStore(config.path / "store"))
    first = stages.run("training", first_flow, 7, config)
    second = stages.run("conversion", second_flow, first.model_copy(), config)
    return LoopResult(first=first, second=second, stages=tuple(stages.times))


def deploy_routed(client: SyncPrefectClient, coordinator: str, stages: str) -> None:
    """Deploy the loop and its stages on these pools."""
    for of, name, pool in (
        (loop_flow, loop_flow.name, coordinator),
        (first_flow, "cpu", stages),
        (second_flow, "cpu", stages),
    ):
        deploy(client, of, name, pool)


def start(client: SyncPrefectClient, config: LoopConfig) -> UUID:
    deployment = client.read_deployment_by_name("routed-loop/routed-loop")
    run = client.create_flow_run_from_deployment(
        deployment.id, parameters={"config": config.model_dump(mode="json")}
    )
    return run.id


def journal(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "journal").read_text().splitlines()]
