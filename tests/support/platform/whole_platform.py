"""The platform as `make up` starts it, with a small use case, and a hand on all its processes.

Nothing of it is replaced: supervisor, guards, server, MLflow, workers, watch, deployments. What a
test wants to kill it finds here, and what it wants to know of runs it asks over HTTP as a browser
would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pandas as pd
import psutil
import yaml

from infra.platform.api import basic_auth
from infra.platform.files import PlatformFiles, read_endpoint, supervisor_pid
from infra.platform.health import read_status
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.data.repository import SmallRepository
from tests.support.host.processes import wait_until
from tests.support.platform.loops import loop_repository
from tests.support.services.servers import free_port

RUN = "PREFECT__FLOW_RUN_ID"
LIMIT_S = 600
BUSY_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0)
"""SQLite has one writer at a time; Prefect's own client asks again in the same way."""

SERVING_PORTS = ("--serving-port", "0", "--serving-grpc-port", "0")

DAY_HOURS = (8, 18)
"""Local hours in which every airport's weather is read by flights."""

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; nothing where it has ended."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return process.cmdline()
    return []


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
class WholePlatform:
    """One platform on a state folder of its own.

    Attributes:
        home: state folder.
        repository: the use case; its raw files can be changed.
        environment: what `up` is given besides the environment of the tests.
    """

    home: Path
    repository: SmallRepository
    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    _renewed: int = 0
    _weather: pd.DataFrame | None = None

    @property
    def files(self) -> PlatformFiles:
        return PlatformFiles(self.home)

    def up(self) -> None:
        """As `make up`; returns when all is ready."""
        words = ("--port", str(self.port), "--mlflow-port", "0", *SERVING_PORTS, *self.options)
        code, said = self.run("falaj", "--home", str(self.home), "up", *words)
        assert code == 0, said

    def down(self) -> None:
        """End all of it, whatever is left."""
        self.run("falaj", "--home", str(self.home), "down", "--now")
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def run(self, module: str, *words: str) -> tuple[int, str]:
        """Run a command of the project for this state folder; its exit code and output."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=PROJECT_ROOT,
            env={
                **inherited,
                "PYTHONPATH": str(PROJECT_ROOT),
                "FALAJ_HOME": str(self.home),
                "FALAJ_FEATURE_REPO": str(self.repository.path),
                **self.environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            preexec_fn=None,
        )
        return done.returncode, done.stdout

    def until_well(self) -> None:
        """Wait until each service is up and each pool has its worker."""
        status = read_status(self.files)

        def is_well() -> bool:
            nonlocal status
            status = read_status(self.files)
            return status.exit_code == 0

        try:
            wait_until(is_well, "all well", LIMIT_S)
        except AssertionError as exc:
            raise AssertionError(f"{exc}: {status.wrong}") from exc

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

    # What a browser does.

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """One request to Prefect's API, with the password; asked again where it is busy (503)."""
        endpoint = read_endpoint(self.files)
        assert endpoint, "the platform has an address"
        password = self.files.secret.read_text().strip()
        request = urllib.request.Request(
            endpoint.api_url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json", **basic_auth(password)},
            method=method,
        )
        for pause_s in BUSY_S:
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    return json.loads(reply.read() or "null")
            except urllib.error.HTTPError as exc:
                if exc.code != 503:
                    raise
                time.sleep(pause_s)
        raise AssertionError(f"{method} {path}: the server was busy {len(BUSY_S)} times")

    def start_loop(self, **changes: Any) -> str:
        """Press Run of `pipeline/pipeline`; changes of its `config` by name of the part."""
        deployment = self.ask("GET", "/deployments/name/pipeline/pipeline")
        config = deployment["parameters"]["config"]
        for part, values in changes.items():
            config[part] = {**config.get(part, {}), **values}
        path = f"/deployments/{deployment['id']}/create_flow_run"
        body = {"parameters": {"config": config}, "idempotency_key": str(uuid4())}
        return str(self.ask("POST", path, body)["id"])

    def state_of(self, run: str) -> dict[str, Any]:
        """State of a run; waits for a server that is away."""
        found: dict[str, Any] = {}

        def is_told() -> bool:
            with suppress(OSError, AssertionError):
                found.update(self.ask("GET", f"/flow_runs/{run}"))
            return bool(found)

        wait_until(is_told, "the server answers", LIMIT_S)
        return {**found["state"], "run_count": found["run_count"]}

    def stage_runs(self, loop: str) -> list[dict[str, Any]]:
        """Runs of stages of a loop, the oldest first."""
        query = {"flow_runs": {"parent_flow_run_id": {"any_": [loop]}}, "limit": 200}
        found = self.ask("POST", "/flow_runs/filter", query)
        return sorted(found, key=lambda run: str(run["created"]))

    # Processes.

    def processes(self) -> list[psutil.Process]:
        """All that names the state folder, by command line or environment."""
        found = []
        for process in psutil.process_iter():
            told = [*command_of(process), *environment_of(process).values()]
            if any(str(self.home) in word for word in told) and lives(process):
                found.append(process)
        return [process for process in found if process.pid != os.getpid()]

    def supervisor(self) -> psutil.Process:
        pid = supervisor_pid(self.files)
        assert pid, "a supervisor lives"
        return psutil.Process(pid)

    def service(self, name: str) -> psutil.Process | None:
        """The process of a service itself, the only child of its guard; None where none lives."""
        state = next((s for s in read_status(self.files).services if s.name == name), None)
        with suppress(psutil.NoSuchProcess):
            if state and state.pid and (children := psutil.Process(state.pid).children()):
                return children[0]
        return None

    def engines(self) -> list[psutil.Process]:
        """Processes that run a flow run themselves."""
        return [
            process
            for process in self.processes()
            if RUN in environment_of(process)
            and "prefect.engine" in command_of(process)
            and _leads_its_group(process)
        ]

    def training(self, kind: str) -> list[psutil.Process]:
        """Processes of a training: its `guard`, or its `rank`s and what they start."""
        found = []
        for engine in self.engines():
            for process in tree_of(engine)[1:]:
                is_guard = any(word.endswith("guard.py") for word in command_of(process))
                if is_guard or any(_is_guard(each) for each in _parents(process)):
                    found.append((process, "guard" if is_guard else "rank"))
        return [process for process, found_kind in found if found_kind == kind]

    def orphans(self) -> list[str]:
        """What lives, names the folder, and belongs neither to the supervisor nor to a live run."""
        pid = supervisor_pid(self.files)
        known = {each.pid for each in tree_of(psutil.Process(pid))} if pid else set()
        return [
            f"{process.pid} {' '.join(command_of(process))[:160]}"
            for process in self.processes()
            if process.pid not in known and lives(process)
        ]


def _is_guard(process: psutil.Process) -> bool:
    return any(word.endswith("guard.py") for word in command_of(process))


def _parents(process: psutil.Process) -> list[psutil.Process]:
    """Ancestors up to, and without, the engine of the run."""
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        for parent in process.parents():
            if "prefect.engine" in command_of(parent) and _leads_its_group(parent):
                break
            found.append(parent)
    return found


def _leads_its_group(process: psutil.Process) -> bool:
    with suppress(ProcessLookupError):
        return os.getpgid(process.pid) == process.pid
    return False


def small_use_case(folder: Path, **changes: dict[str, Any]) -> SmallRepository:
    """One month of flights, and gates that every candidate passes, so that each loop promotes."""
    repository = loop_repository(folder)
    file = repository.path / "use_case.yaml"
    described = yaml.safe_load(file.read_text())
    described["promotion"] |= {"champion_margin": 0.5}
    for part, values in changes.items():
        described[part] = {**described.get(part, {}), **values}
    file.write_text(yaml.safe_dump(described))
    return repository


@contextmanager
def whole_platform(
    folder: Path,
    *options: str,
    environment: Mapping[str, str] | None = None,
    **changes: dict[str, Any],
) -> Iterator[WholePlatform]:
    """A platform that is up; all of it is gone when the block ends. Only sweeps run by schedule."""
    folder.mkdir(parents=True, exist_ok=True)
    repository = small_use_case(folder, **changes)
    platform = WholePlatform(folder / "home", repository, environment or {}, options)
    try:
        platform.up()
        for deployment in platform.ask("POST", "/deployments/filter", {"limit": 200}):
            if not _is_sweep(platform, deployment):
                for schedule in deployment["schedules"]:
                    path = f"/deployments/{deployment['id']}/schedules/{schedule['id']}"
                    platform.ask("PATCH", path, {"active": False})
        yield platform
    finally:
        platform.down()


def _is_sweep(platform: WholePlatform, deployment: dict[str, Any]) -> bool:
    flow = platform.ask("GET", f"/flows/{deployment['flow_id']}")
    return str(flow["name"]).endswith("-sweep")
