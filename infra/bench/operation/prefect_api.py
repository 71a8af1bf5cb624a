"""A real Prefect server with password on a free port, and process workers on it.

Everything started here ends with its `with` block, and when this process is killed.
"""

from __future__ import annotations

import base64
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from infra.orchestration.embedded import free_port
from infra.platform.services import SERVER_SETTINGS
from tasks.kernel import guard
from tasks.kernel.settings import PROJECT_ROOT

START_LIMIT_S = 240
STOP_LIMIT_S = 30
GRACE_S = 5


@dataclass(frozen=True)
class PrefectApi:
    """A running server.

    Attributes:
        home: folder of its state; `home / "server.log"` is its log.
        environment: all that a command needs to reach it (address, password, Prefect's folders).
    """

    home: Path
    url: str
    auth_string: str
    environment: Mapping[str, str]

    def command_environment(self, **more: str) -> dict[str, str]:
        """The environment of a command that uses this server; nothing of Prefect's is inherited."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        return {**inherited, **self.environment, "PYTHONPATH": str(PROJECT_ROOT), **more}

    @contextmanager
    def in_process(self) -> Iterator[None]:
        """Flows and clients of this process use this server inside the block, without heartbeats.

        The variables are set for child processes too.
        """
        from prefect.logging.handlers import APILogHandler
        from prefect.settings import (
            PREFECT_API_AUTH_STRING,
            PREFECT_API_URL,
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
            PREFECT_LOCAL_STORAGE_PATH,
            PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
            temporary_settings,
        )

        with patch.dict(os.environ, self.environment):
            with temporary_settings(
                {
                    PREFECT_API_URL: self.url,
                    PREFECT_API_AUTH_STRING: self.auth_string,
                    PREFECT_LOCAL_STORAGE_PATH: self.environment["PREFECT_LOCAL_STORAGE_PATH"],
                    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False,
                    PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
                }
            ):
                yield
                APILogHandler().flush()  # while there is a server to send to

    @contextmanager
    def worker(self, pool: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        """A process worker on a pool, which it makes where there is none; polls each second.

        What is yielded is its guard: SIGTERM ends worker and runs, SIGKILL kills them all at once.
        """
        command = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process"]
        command += ["--pool", pool, "--name", f"{pool}-{secrets.token_hex(3)}"]
        with guarded(
            command,
            self.home / f"worker-{pool}.log",
            self.command_environment(**{"PREFECT_WORKER_QUERY_SECONDS": "1"} | environment),
        ) as process:
            yield process


@contextmanager
def guarded(
    command: list[str], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A command under the guard process, its output in a log, ended with the block."""
    line = [sys.executable, "-S", guard.__file__, str(os.getpid()), str(GRACE_S), "--", *command]
    with (
        log.open("ab") as output,
        subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            cwd=log.parent,
            preexec_fn=_default_signals,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def prefect_api_server(home: Path) -> Iterator[PrefectApi]:
    """A Prefect server on a new or an earlier state folder, ready when this yields."""
    home.mkdir(parents=True, exist_ok=True)
    port, auth_string = free_port(), f"admin:{secrets.token_urlsafe(16)}"
    url = f"http://127.0.0.1:{port}/api"
    api = PrefectApi(
        home,
        url,
        auth_string,
        {
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": url,
            "PREFECT_API_AUTH_STRING": auth_string,
            "PREFECT_LOCAL_STORAGE_PATH": str(home / "results"),
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
            "PREFECT_CLI_PROMPT": "false",
            "DO_NOT_TRACK": "1",
        },
    )
    environment = api.command_environment(
        **SERVER_SETTINGS,
        PREFECT_SERVER_API_AUTH_STRING=auth_string,
        PREFECT_API_DATABASE_CONNECTION_URL=f"sqlite+aiosqlite:///{home / 'prefect.db'}",
    )
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "--factory",
        "infra.platform.apps:create_prefect",
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    log = home / "server.log"
    with guarded(command, log, environment) as server:
        _wait_until_ready(server, api, log)
        yield api


def _wait_until_ready(server: subprocess.Popen[bytes], api: PrefectApi, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    password = base64.b64encode(api.auth_string.encode()).decode()
    request = urllib.request.Request(
        f"{api.url}/admin/version", headers={"Authorization": f"Basic {password}"}
    )
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise RuntimeError(f"no Prefect server: {log.read_text(errors='replace')[-3000:]}")


def _default_signals() -> None:
    """A worker that inherits an ignored SIGINT never ends on SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
