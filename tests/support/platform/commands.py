"""A platform by its commands: what a person types, what it says, and what is then there."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil

from infra.platform.api import PrefectApi, basic_auth
from infra.platform.files import Endpoint, PlatformFiles, read_endpoint
from infra.platform.health import read_status
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.host.processes import wait_until

LIMIT_S = 300
UP = ("--mlflow-port", "0", "--serving-port", "0", "--serving-grpc-port", "0",
      "--deploying", "tests.support.platform.platform_pools")  # fmt: skip


@dataclass
class Platform:
    """A platform and what its commands said."""

    home: Path
    port: int
    said_at_first: str = ""

    @property
    def files(self) -> PlatformFiles:
        return PlatformFiles(self.home)

    @property
    def endpoint(self) -> Endpoint:
        found = read_endpoint(self.files)
        assert found
        return found

    @property
    def password(self) -> str:
        return self.files.secret.read_text().strip()

    @property
    def api(self) -> PrefectApi:
        return PrefectApi(self.endpoint.api_url, self.password, timeout_s=60)

    def command(self, *arguments: str) -> subprocess.Popen[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "falaj", "--home", str(self.home), *arguments],
            cwd=PROJECT_ROOT,
            env={**inherited, "PYTHONPATH": str(PROJECT_ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        with self.command(*arguments) as process:
            said, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, said

    def up(self) -> tuple[int, str]:
        return self.run("up", "--port", str(self.port), *UP)

    def until_well(self) -> None:
        def is_well() -> bool:
            return read_status(self.files).exit_code == 0

        wait_until(is_well, f"all well: {read_status(self.files).wrong}", LIMIT_S)

    def post(self, path: str, body: object) -> Any:
        headers = {"Content-Type": "application/json", **basic_auth(self.password)}
        request = urllib.request.Request(
            self.endpoint.api_url + path, json.dumps(body).encode(), headers
        )
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    return json.load(reply)
            except HTTPError as exc:  # 503: SQLite has one writer, ask again
                if exc.code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                    raise
            time.sleep(1)

    def start_run(self, seconds: float) -> str:
        """Start a run that is busy for some seconds, and wait until it is."""
        [deployment] = self.post("/deployments/filter", {})
        path = f"/deployments/{deployment['id']}/create_flow_run"
        run = str(self.post(path, {"parameters": {"seconds": seconds}})["id"])
        wait_until(lambda: self.state_of(run)["type"] == "RUNNING", "run Running", LIMIT_S)
        return run

    def state_of(self, run: str) -> dict[str, Any]:
        found = self.post("/flow_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
        return dict(found[0]["state"])

    def planned_run(self, after: datetime) -> str:
        """The next run that the scheduler has made, or makes."""

        def found() -> dict[str, Any] | None:
            return self.api.next_scheduled(after.isoformat())

        wait_until(found, "a planned run", LIMIT_S)
        run = found()
        assert run
        return str(run["id"])

    def stored_state_of(self, run: str) -> str:
        """State as the database has it, without a server."""
        with sqlite3.connect(self.files.prefect / "prefect.db") as connection:
            row = connection.execute("SELECT state_name FROM flow_run WHERE id = ?", [run])
            return str(row.fetchone()[0])

    def processes(self) -> list[psutil.Process]:
        """All processes that name the state folder."""
        found = []
        for process in psutil.process_iter():
            try:
                told = [*process.cmdline(), *process.environ().values()]
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if any(str(self.home) in word for word in told) and process.is_running():
                found.append(process)
        return [p for p in found if p.pid != os.getpid()]

    def guarded_process(self, service: str) -> psutil.Process:
        """The process of a service itself, the only child of its guard."""
        found = next(s for s in read_status(self.files).services if s.name == service)
        assert found.pid
        return psutil.Process(found.pid).children()[0]
