"""The platform as `make up` starts it, with a small use case, and a hand on all its processes.

Nothing of it is replaced: supervisor, guards, server, MLflow, workers, watch, deployments. What a
test wants to kill it finds here, and what it wants to know of runs it asks over HTTP as a browser
would.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pandas as pd
import psutil
import yaml

from infra.platform.config import DATABASE_URL
from infra.platform.files import supervisor_pid
from tests.support.data.repository import SmallRepository
from tests.support.host.processes import command_of, wait_until
from tests.support.platform.accounts import STAGES, Account
from tests.support.platform.commands import Platform
from tests.support.platform.loops import loop_repository

RUN = "PREFECT__FLOW_RUN_ID"
DAY_HOURS = (8, 18)
"""Local hours in which every airport's weather is read by flights."""

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
LIMIT_S = 3600
"""Of a loop; generous, since a busy machine is ten times slower than a quiet one."""

ENDED_WITHIN_S = 60


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Its environment; nothing where it has ended."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return process.environ()
    return {}


def lives(process: psutil.Process) -> bool:
    """True while it runs; its zombie does not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def tree_of(process: psutil.Process) -> list[psutil.Process]:
    """A process and all its descendants."""
    with suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


@dataclass
class WholePlatform(Platform):
    """One platform with all that the project deploys, for a small use case.

    Attributes:
        repository: the use case; its raw files can be changed.
    """

    repository: SmallRepository = field(kw_only=True)
    _renewed: int = 0
    _weather: pd.DataFrame | None = None

    def renew_data(self) -> None:
        """Give one hour the temperature of the next, so that no stage is finished for these rows.

        One hour alone, and another one each time: what is off the grid of the readings, or changes
        much of a day, is found out by the validation. An hour of the day: at night no flight reads
        it, and the training set would be the same.
        """
        if self._weather is None:
            self._weather = self.repository.read("weather")
        rows = self._weather.copy()
        by_day, following = rows["hour"].astype(int).between(*DAY_HOURS), rows["temp"].shift(-1)
        differing = rows.index[by_day & following.notna() & (rows["temp"] != following)]
        self._renewed += 1
        hour = differing[2 * self._renewed % len(differing)]
        rows.loc[hour, "temp"] = rows.loc[hour + 1, "temp"]
        self.repository.write("weather", rows)

    def schedule_sweeps_alone(self) -> None:
        """Pause all other schedules."""
        for deployment in self.ask("POST", "/deployments/filter", {"limit": 200}):
            flow = self.ask("GET", f"/flows/{deployment['flow_id']}")
            for schedule in deployment["schedules"]:
                if not str(flow["name"]).endswith("-sweep"):
                    path = f"/deployments/{deployment['id']}/schedules/{schedule['id']}"
                    self.ask("PATCH", path, {"active": False})

    def start_loop(self, **changes: Any) -> str:
        """Press Run of `pipeline/pipeline`; changes of its `config` by name of the part."""
        deployment = self.ask("GET", "/deployments/name/pipeline/pipeline")
        config = deployment["parameters"]["config"]
        for part, values in changes.items():
            config[part] = {**config.get(part, {}), **values}
        path = f"/deployments/{deployment['id']}/create_flow_run"
        body = {"parameters": {"config": config}, "idempotency_key": str(uuid4())}
        return str(self.ask("POST", path, body)["id"])

    def stage_runs(self, loop: str) -> list[dict[str, Any]]:
        """Runs of stages of a loop, the oldest first."""
        query = {"flow_runs": {"parent_flow_run_id": {"any_": [loop]}}, "limit": 200}
        found = self.ask("POST", "/flow_runs/filter", query)
        return sorted(found, key=lambda run: str(run["created"]))

    @property
    def account(self) -> Account:
        """What is written about it, in whichever database its profile has."""
        told = self.environment
        return Account(self.home, told.get(DATABASE_URL), told.get("FALAJ_DATABASE_URL"))

    def supervisor(self) -> psutil.Process:
        pid = supervisor_pid(self.files)
        assert pid, "a supervisor lives"
        return psutil.Process(pid)

    def engines(self) -> list[psutil.Process]:
        """Processes that run a flow run themselves."""
        return [
            process
            for process in self.processes()
            if RUN in environment_of(process)
            and "prefect.engine" in command_of(process.pid).split()
            and _leads_its_group(process)
        ]

    def training(self, kind: str) -> list[psutil.Process]:
        """Processes of a training: its `guard`, or its `rank`s and what they start."""
        found = []
        for engine in self.engines():
            guards = [each for each in tree_of(engine)[1:] if _is_guard(each)]
            below = [each for guard in guards for each in tree_of(guard)[1:]]
            found += guards if kind == "guard" else [one for one in below if not _is_guard(one)]
        return list(dict.fromkeys(found))

    def check_all_ended(self) -> None:
        """Nothing of any run is left: no state that waits, no lease, no slot, no process."""
        account = self.account
        for left in (account.unfinished, account.leases, account.slots, self.orphans):
            wait_until(lambda left=left: not left(), f"{left.__name__}: {left()}", ENDED_WITHIN_S)

    def check_completed_once(self, loop: str) -> None:
        """Every stage came to its end once, nothing was built twice, the promotion is whole."""
        wait_until(lambda: self.state_of(loop)["type"] in FINAL, f"loop {loop} has ended", LIMIT_S)
        assert self.state_of(loop)["type"] == "COMPLETED", self.state_of(loop)
        account = self.account
        assert account.completions(loop) == dict.fromkeys(STAGES, 1), account.stage_runs(loop)
        assert not account.repeated_builds()
        account.champion()
        self.check_all_ended()

    def bring_to_its_end(self, loop: str, left_alone_s: float) -> str:
        """Wait until a loop is completed; retry it as a person would where nothing else does.

        Args:
            left_alone_s: so long after a crash the watch does not start it again.

        Returns:
            How it was brought there.
        """
        by, crashed_since = "by itself", None
        deadline = time.monotonic() + LIMIT_S
        while (state := self.state_of(loop))["type"] != "COMPLETED":
            assert time.monotonic() < deadline, f"loop {loop} is {state}"
            if state["type"] != "CRASHED":
                crashed_since = None
            crashed_since = crashed_since or time.monotonic()
            left_alone = time.monotonic() - crashed_since > left_alone_s
            if state["type"] == "FAILED" or (state["type"] == "CRASHED" and left_alone):
                code, said = self.run("--on-platform", "retry", loop)
                assert code == 0, said
                by = f"by command, after: {state['message']}"
            time.sleep(0.5)
        return f"{by}, attempts {state['run_count']}"

    def orphans(self) -> list[str]:
        """What lives, names the folder, and belongs neither to the supervisor nor to a live run."""
        pid = supervisor_pid(self.files)
        known = {each.pid for each in tree_of(psutil.Process(pid))} if pid else set()
        return [
            f"{process.pid} {command_of(process.pid)[:160]}"
            for process in self.processes()
            if process.pid not in known and lives(process)
        ]


def what_stays(left: Callable[[], object], what: str, limit_s: float) -> list[str]:
    """What is still left after so long, in words; empty where nothing is."""
    try:
        wait_until(lambda: not left(), what, limit_s)
    except TimeoutError:
        return [f"{what}: {left()}"]
    return []


def _is_guard(process: psutil.Process) -> bool:
    return any(word.endswith("guard.py") for word in command_of(process.pid).split())


def _leads_its_group(process: psutil.Process) -> bool:
    with suppress(ProcessLookupError):
        return os.getpgid(process.pid) == process.pid
    return False


def platform_repository(folder: Path) -> SmallRepository:
    """One month of flights, with gates that every candidate passes."""
    folder.mkdir(parents=True, exist_ok=True)
    repository = loop_repository(folder)
    file = repository.path / "use_case.yaml"
    described = yaml.safe_load(file.read_text())
    described["promotion"] |= {"champion_margin": 0.5}
    file.write_text(yaml.safe_dump(described))
    return repository


@contextmanager
def whole_platform(
    folder: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[WholePlatform]:
    """A platform that is up; all of it is gone when the block ends. Only sweeps run by schedule.

    Its use case is that of `platform_repository`.
    """
    repository = platform_repository(folder)
    platform = WholePlatform(
        folder / "home",
        options,
        {"FALAJ_FEATURE_REPO": str(repository.path), **(environment or {})},
        repository=repository,
    )
    with platform:
        platform.schedule_sweeps_alone()
        yield platform
