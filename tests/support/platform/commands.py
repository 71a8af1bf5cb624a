"""A platform by its commands: what a person types, what it says, and what is then there."""

import json
import os
import sqlite3
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError

import psutil

from infra.orchestration.embedded import free_port
from infra.platform.api import PrefectApi, basic_auth
from infra.platform.files import Endpoint, PlatformFiles, read_endpoint
from infra.platform.health import read_status
from tests.support.host.processes import falaj, processes_of, run_falaj, wait_until

LIMIT_S = 600
OTHER_PORTS = tuple(f"--{service}-port=0" for service in ("mlflow", "serving", "serving-grpc"))
SMALL = ("--deploying", "tests.support.platform.platform_pools")
"""Pools and one flow instead of all that the project deploys."""


@dataclass
class Platform:
    """A platform, up while its block lasts, and what `up` said.

    Attributes:
        environment: what its commands are given besides that of the tests.
        options: of `up`.
    """

    home: Path
    options: tuple[str, ...] = SMALL
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    said: str = ""

    def __enter__(self) -> Self:
        code, self.said = self.up()
        if code:
            self.end()
        assert code == 0, self.said
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def files(self) -> PlatformFiles:
        return PlatformFiles(self.home)

    @property
    def endpoint(self) -> Endpoint:
        found = read_endpoint(self.files)
        assert found, "the platform has an address"
        return found

    @property
    def password(self) -> str:
        return self.files.secret.read_text().strip()

    @property
    def api(self) -> PrefectApi:
        return PrefectApi(self.endpoint.api_url, self.password, timeout_s=60)

    def command(self, *arguments: str) -> subprocess.Popen[str]:
        return falaj("--home", str(self.home), *arguments, **self.environment)

    def run(self, *arguments: str) -> tuple[int, str]:
        return run_falaj("--home", str(self.home), *arguments, **self.environment)

    def up(self) -> tuple[int, str]:
        return self.run("up", "--port", str(self.port), *OTHER_PORTS, *self.options)

    def end(self) -> None:
        """End all of it, whatever is left."""
        self.run("down", "--now")
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def until_well(self) -> None:
        """Wait until each service is up and each pool has its worker."""
        try:
            wait_until(lambda: read_status(self.files).exit_code == 0, "all well", LIMIT_S)
        except TimeoutError as exc:
            raise AssertionError(f"{exc}: {read_status(self.files).wrong}") from exc

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """One request to Prefect's API, with the password; asked again where it is busy (503)."""
        headers = {"Content-Type": "application/json", **basic_auth(self.password)}
        data = None if body is None else json.dumps(body).encode()
        address = self.endpoint.api_url + path
        request = urllib.request.Request(address, data, headers, method=method)
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    return json.loads(reply.read() or "null")
            except HTTPError as exc:
                if exc.code != 503 or time.monotonic() > deadline:
                    raise
            time.sleep(1)

    def start_run(self, seconds: float) -> str:
        """Start a run that is busy for some seconds, and wait until it is."""
        [deployment] = self.ask("POST", "/deployments/filter", {})
        path = f"/deployments/{deployment['id']}/create_flow_run"
        run = str(self.ask("POST", path, {"parameters": {"seconds": seconds}})["id"])
        self.until_state(run, "RUNNING")
        return run

    def state_of(self, run: str) -> dict[str, Any]:
        """State of a run and how often it was started; waits for a server that is away."""
        found: dict[str, Any] = {}

        def is_told() -> bool:
            with suppress(OSError, AssertionError):
                found.update(self.ask("GET", f"/flow_runs/{run}"))
            return bool(found)

        wait_until(is_told, "the server answers", LIMIT_S)
        return {**found["state"], "run_count": found["run_count"]}

    def until_state(self, run: str, state: str) -> None:
        wait_until(lambda: self.state_of(run)["type"] == state, f"run {state}", LIMIT_S)

    def stored_state_of(self, run: str) -> str:
        """State as the database has it, without a server."""
        with sqlite3.connect(self.files.prefect / "prefect.db") as connection:
            row = connection.execute("SELECT state_name FROM flow_run WHERE id = ?", [run])
            return str(row.fetchone()[0])

    def processes(self) -> list[psutil.Process]:
        """All processes that name the state folder."""
        return [process for process in processes_of(self.home) if process.pid != os.getpid()]

    def service(self, name: str) -> psutil.Process | None:
        """The process of a service itself, the only child of its guard; None where none lives."""
        state = next((s for s in read_status(self.files).services if s.name == name), None)
        with suppress(psutil.NoSuchProcess):
            if state and state.pid and (children := psutil.Process(state.pid).children()):
                return children[0]
        return None
