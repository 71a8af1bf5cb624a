"""A platform whose processes can be killed one by one: a server, two workers, and the watch.

Nothing guards them: what one leaves behind when it is killed, another has to find.
"""

from __future__ import annotations

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
from pathlib import Path

import psutil

from infra.platform.services import SERVER_SETTINGS
from tasks.control.recovery.config import RecoveryConfig
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.host.processes import wait_until
from tests.support.services.servers import free_port

COMPONENTS = ("server", "coordinator", "stages", "watch")
START_LIMIT_S = 300


class KillablePlatform:
    """The processes of one platform, on one port and one folder for all their lives.

    Args:
        home: folder of its state and logs.
        pools: work pool by component, for `coordinator` and `stages`.
        recovery: limits of the watch.
        more: further variables of all its processes.
    """

    def __init__(
        self,
        home: Path,
        pools: Mapping[str, str],
        recovery: RecoveryConfig,
        more: Mapping[str, str],
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home, self._pools = home, pools
        self._port = free_port()
        self._recovery = home / "recovery.json"
        self._recovery.write_text(recovery.model_dump_json())
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        self.client_environment = {
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": f"http://127.0.0.1:{self._port}/api",
            "PREFECT_LOCAL_STORAGE_PATH": str(home / "results"),
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "PYTHONPATH": str(PROJECT_ROOT),
            **more,
        }
        self._environment = {**inherited, **self.client_environment}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start_what_is_lacking(self) -> None:
        """Start each component that does not run, the server first."""
        for name in COMPONENTS:
            process = self._running.get(name)
            if process is None or process.poll() is not None:
                self._running[name] = self._start(name)
                if name == "server":
                    wait_until(self._answers, "the server answers", START_LIMIT_S)

    def kill(self, *names: str) -> None:
        """Send SIGKILL to components, all at the same moment, and reap them."""
        for name in names:
            self._running[name].kill()
        for name in names:
            self._running[name].wait(60)

    def engines(self) -> list[psutil.Process]:
        """Processes that run a flow run at the moment."""
        workers = {p.pid for p in self._running.values()}
        return [p for p in self.processes() if p.pid not in workers and _is_engine(p)]

    def processes(self) -> list[psutil.Process]:
        """Everything that belongs to the platform: its folder is in each one's environment."""
        found = []
        for process in psutil.process_iter():
            try:
                belongs = process.environ().get("PREFECT_HOME") == str(self.home)
                if belongs and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
        return [p for p in found if p.pid != os.getpid()]

    def orphans(self) -> list[psutil.Process]:
        """Processes beyond the components and what these are starting or running."""
        components = {p.pid for p in self._running.values()}
        return [p for p in self.processes() if p.pid not in components]

    def kill_everything(self) -> None:
        """The machine's power goes: all processes at once."""
        for process in self.processes():
            _send_kill(process)
        for running in self._running.values():
            running.wait(60)

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        environment = {**self._environment}
        if name == "server":
            environment |= SERVER_SETTINGS
            environment.pop("PREFECT_API_URL")
            database = f"sqlite+aiosqlite:///{self.home / 'prefect.db'}"
            environment["PREFECT_API_DATABASE_CONNECTION_URL"] = database
        with (self.home / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                self._command(name),
                cwd=self.home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_default_signals,
            )

    def _command(self, name: str) -> list[str]:
        if name == "server":
            serve = ["uvicorn", "--factory", "infra.platform.apps:create_prefect"]
            where = ["--host", "127.0.0.1", "--port", str(self._port), "--log-level", "warning"]
            return [sys.executable, "-m", *serve, *where]
        if name == "watch":
            watch = ["flows.recovery", "--every", "3", "--config", str(self._recovery)]
            return [sys.executable, "-m", *watch]
        worker = ["prefect", "worker", "start", "--type", "process", "--pool", self._pools[name]]
        return [sys.executable, "-m", *worker, "--name", f"{name}-{secrets.token_hex(3)}"]

    def _answers(self) -> bool:
        url = f"http://127.0.0.1:{self._port}/api/health"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


@contextmanager
def killable_platform(
    home: Path, pools: Mapping[str, str], recovery: RecoveryConfig, **more: str
) -> Iterator[KillablePlatform]:
    """A platform with its server up; all of it is gone when the block ends."""
    platform = KillablePlatform(home, pools, recovery, more)
    try:
        platform.start_what_is_lacking()
        yield platform
    finally:
        deadline = time.monotonic() + 60
        while (left := platform.processes()) and time.monotonic() < deadline:
            for process in left:
                _send_kill(process)
            time.sleep(0.2)
        for running in platform._running.values():
            running.wait(60)


def _is_engine(process: psutil.Process) -> bool:
    try:
        return "PREFECT__FLOW_RUN_ID" in process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False


def _send_kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _default_signals() -> None:
    """A worker that inherits an ignored SIGINT never ends on SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
