"""A real Prefect server with password on a free port, and process workers on it.

Everything started here ends with its `with` block, and when this process is killed.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from infra.orchestration.client import server_command, server_settings
from infra.orchestration.embedded import free_port
from infra.platform.api import answers
from infra.platform.services import path_to_python
from tasks.kernel.process import guarded_process, wait_until_ready
from tasks.kernel.settings import PROJECT_ROOT

IN_PROCESS = (
    *("PREFECT_API_URL", "PREFECT_API_AUTH_STRING"),
    *("PREFECT_LOCAL_STORAGE_PATH", "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"),
)
"""Variables that a process with Prefect in it is told as settings too."""


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
        from prefect import settings
        from prefect.logging.handlers import APILogHandler

        # Read from variables when Prefect was imported, so they have to be said anew.
        named = {getattr(settings, name): self.environment[name] for name in IN_PROCESS}
        told: dict[Any, str | None] = {**named, settings.PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
        with patch.dict(os.environ, self.environment), settings.temporary_settings(told):
            yield
            APILogHandler().flush()  # while there is a server to send to

    @contextmanager
    def worker(self, pool: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        """A process worker on a pool, which it makes where there is none; polls each second.

        What is yielded is its guard: SIGTERM ends worker and runs, SIGKILL kills them all at once.
        """
        command = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process"]
        command += ["--pool", pool, "--name", f"{pool}-{secrets.token_hex(3)}"]
        log = self.home / f"worker-{pool}.log"
        usual = {"PREFECT_WORKER_QUERY_SECONDS": "1", "PATH": path_to_python(os.environ)}
        usual["FALAJ_HOME"] = str(self.home / "state")
        variables = self.command_environment(**usual | environment)
        with guarded_process(command, log, variables, folder=self.home) as process:
            yield process


@contextmanager
def prefect_api_server(home: Path) -> Iterator[PrefectApi]:
    """A Prefect server on a new or an earlier state folder, ready when this yields."""
    home.mkdir(parents=True, exist_ok=True)
    port, auth_string = free_port(), f"admin:{secrets.token_urlsafe(16)}"
    url = f"http://127.0.0.1:{port}/api"
    told = {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": url,
        "PREFECT_API_AUTH_STRING": auth_string,
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "results"),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_CLI_PROMPT": "false",
        "DO_NOT_TRACK": "1",
    }
    api = PrefectApi(home, url, auth_string, told)
    environment = api.command_environment(
        **server_settings("every", "platform"),
        PREFECT_SERVER_API_AUTH_STRING=auth_string,
        PREFECT_API_DATABASE_CONNECTION_URL=f"sqlite+aiosqlite:///{home / 'prefect.db'}",
    )
    log = home / "server.log"
    command = server_command("create_prefect", "127.0.0.1", port)
    with guarded_process(command, log, environment, folder=home) as server:
        ready = partial(answers, f"{url}/admin/version", auth_string)
        wait_until_ready(server, ready, "the Prefect server", log, 240)
        yield api
