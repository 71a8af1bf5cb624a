"""Server, workers, engines, or all at once, are killed at random moments of a loop.

`FALAJ_DRILL_KILLS` (default 6) says how often, `FALAJ_KILLS_SEED` (default 0) which and when. Each
loop has two stages on a pool of their own, and after each kill what was killed is started again, as
a supervisor would. At the end of each: the loop is completed, no stage that had finished was
repeated, nothing is left running, by the API's account or the kernel's, and no slot is taken.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from tasks.control.recovery.config import RecoveryConfig
from tests.support.host.processes import wait_until
from tests.support.platform.deployed import deploy, is_final, wait_for_run
from tests.support.platform.killable import KillablePlatform, killable_platform
from tests.support.platform.routed_flows import LoopConfig, first_flow, loop_flow, second_flow
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

KILLS = int(os.environ.get("FALAJ_DRILL_KILLS", "6"))
SEED = int(os.environ.get("FALAJ_KILLS_SEED", "0"))
LOOP_LIMIT_S = 900
GONE_WITHIN_S = 120
POOLS = {"coordinator": "drill-coordinator", "stages": "drill-stages"}
RECOVERY = RecoveryConfig(pending_limit_s=60, max_retries=10)
VICTIMS = (
    "an engine",
    "all engines",
    "coordinator",
    "stages",
    "server",
    "coordinator and its engines",
    "both workers",
    "everything",
)
UNFINISHED = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING, StateType.SCHEDULED]


@dataclass(frozen=True)
class Kill:
    victim: str
    after_s: float
    state: str
    attempts: int
    repeated: int
    seconds: float


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[KillablePlatform]:
    with ExitStack() as stack:
        platform = stack.enter_context(killable_platform(tmp_path / "p", POOLS, RECOVERY))
        url = platform.client_environment["PREFECT_API_URL"]
        chosen = {PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: None}
        stack.enter_context(temporary_settings(chosen))
        with get_client(sync_client=True) as client:
            entry = "tests.support.platform.routed_flows."
            pools = POOLS["coordinator"], POOLS["stages"]
            deploy(client, loop_flow, f"{entry}loop_flow", loop_flow.name, pools[0])
            deploy(client, first_flow, f"{entry}first_flow", "cpu", pools[1])
            deploy(client, second_flow, f"{entry}second_flow", "cpu", pools[1])
        yield platform


@contextmanager
def api() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


def started(folder: Path, pause_s: float) -> UUID:
    config = LoopConfig(folder=str(folder), pause_s=pause_s)
    with api() as client:
        deployment = client.read_deployment_by_name("routed-loop/routed-loop")
        parameters = {"config": config.model_dump(mode="json")}
        return client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id


def strike(platform: KillablePlatform, victim: str, draw: random.Random) -> None:
    """Kill, and start again what a supervisor would."""
    engines = platform.engines()
    if victim == "an engine" and engines:
        engines = [draw.choice(engines)]
    if victim in ("an engine", "all engines", "coordinator and its engines"):
        for engine in engines:
            engine.send_signal(signal.SIGKILL)
    if victim in ("coordinator", "coordinator and its engines"):
        platform.kill("coordinator")
    if victim in ("stages", "server"):
        platform.kill(victim)
    if victim == "both workers":
        platform.kill("coordinator", "stages")
    if victim == "everything":
        platform.kill_everything()
    platform.start_what_is_lacking()


def is_over(run: FlowRun) -> bool:
    """True where a run has ended for good; one that was cut off is started again by the watch."""
    return is_final(run) and run.state is not None and not run.state.is_crashed()


def unfinished(client: SyncPrefectClient) -> list[FlowRun]:
    """Runs that have not ended; those of the watch's own sweep come and go."""
    state = FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED))
    runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(state=state))
    sweep = {f.id for f in client.read_flows() if f.name == "recovery-sweep"}
    return [run for run in runs if run.flow_id not in sweep]


def completed_stages(client: SyncPrefectClient, folder: Path) -> dict[str, int]:
    """How many runs of each stage were completed for the loop of this folder."""
    done = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.COMPLETED]))
    names = {flow.id: flow.name for flow in client.read_flows()}
    counts: dict[str, int] = {}
    for run in client.read_flow_runs(flow_run_filter=FlowRunFilter(state=done)):
        if run.parameters.get("config", {}).get("folder") == str(folder):
            name = names[run.flow_id]
            counts[name] = counts.get(name, 0) + 1
    return counts


def slots_taken(client: SyncPrefectClient) -> float:
    return sum(limit.active_slots for limit in client.read_global_concurrency_limits(limit=100))


def one_kill(platform: KillablePlatform, folder: Path, draw: random.Random, whole_s: float) -> Kill:
    folder.mkdir()
    (folder / "allowed").touch()
    victim, after_s = draw.choice(VICTIMS), draw.uniform(0, whole_s)
    began = time.monotonic()
    run = started(folder, pause_s=1)
    time.sleep(after_s)
    strike(platform, victim, draw)
    with api() as client:
        ended = wait_for_run(client, run, is_over, f"the loop, {victim} killed", LOOP_LIMIT_S)
        seconds = time.monotonic() - began
        wait_until(lambda: not unfinished(client), "no run is stuck", GONE_WITHIN_S)
        wait_until(lambda: not platform.orphans(), "no orphan is left", GONE_WITHIN_S)
        wait_until(lambda: not slots_taken(client), "no slot is taken", GONE_WITHIN_S)
        done = completed_stages(client, folder)
    repeated = sum(count - 1 for count in done.values())
    assert set(done) == {"routed-loop", "routed-first", "routed-second"}, (victim, ended.state)
    name = ended.state_name or "?"
    return Kill(victim, after_s, name, ended.run_count, repeated, seconds)


@proves(Promise.INTERRUPT, "completed; no stage repeated, no orphan, no slot taken")
def test_a_loop_is_completed_whatever_is_killed_and_repeats_no_finished_stage(
    platform: KillablePlatform, tmp_path: Path
) -> None:
    draw = random.Random(SEED)
    platform.start_what_is_lacking()
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    (quiet / "allowed").touch()
    began = time.monotonic()
    run = started(quiet, pause_s=1)
    with api() as client:
        wait_for_run(client, run, is_final, "a loop that nobody disturbs", LOOP_LIMIT_S)
    whole_s = time.monotonic() - began
    table = [one_kill(platform, tmp_path / f"loop-{n}", draw, whole_s) for n in range(KILLS)]
    sys.stdout.write(f"\nundisturbed: {whole_s:.0f} s\n")
    for kill in table:
        sys.stdout.write(
            f"{kill.victim:<28} killed after {kill.after_s:5.1f} s  {kill.state:<10} "
            f"attempts {kill.attempts}  repeated {kill.repeated}  {kill.seconds:5.0f} s\n"
        )
    assert all(kill.state == "Completed" for kill in table)
    assert not sum(kill.repeated for kill in table)
