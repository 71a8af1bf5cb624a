"""The embedded default: a Prefect API of one's own while a flow runs, with its state in SQLite.

Where `PREFECT_API_URL` is set, that server is used and nothing is started.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from infra.orchestration.client import prefect_settings
from tasks.kernel.errors import (
    ConfigurationError,
    DataContractError,
    StorageError,
    TransientError,
    refused_writes_explained,
)
from tasks.kernel.files import lack_of_space, locked, make_folder, require_space

SERVER = "infra.platform.apps:create_prefect"
START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 15
FLUSH_TIMEOUT_S = 10
LONGEST_REASON = 300

# Of the caller's environment; anything else there may be a secret.
SERVER_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
# A flow that runs in this process needs the API and its records; schedules, late runs and work
# pools are for a platform that stays up.
SERVER_ENVIRONMENT = {
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_FOREMAN_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_UI_API_URL": "/api",  # else the UI asks port 4200, whatever port it came from
}


@contextmanager
def disk_with_space(home: Path) -> Iterator[None]:
    """See that a run can begin, and tell where a full disk was what ended it.

    What fails for want of space is often not what writes: Prefect's server answers with an error,
    or ends. So whatever failed while there is none left is told as that.

    Raises:
        StorageError: there is too little space.
    """
    require_space(home)
    try:
        yield
    except (ConfigurationError, DataContractError, StorageError):
        raise
    except Exception as exc:
        if trouble := lack_of_space(home):
            said = str(exc).partition("\n")[0][:LONGEST_REASON]
            raise StorageError(
                f"{trouble}; finished stages are kept. The run met {type(exc).__name__}: {said}"
            ) from exc
        raise


@contextmanager
def only_run(home: Path) -> Iterator[None]:
    """Hold the state folder for one run at a time.

    Raises:
        ConfigurationError: another run holds it.
    """
    file = home / "run.lock"
    with locked(file, wait_s=0, held=lambda: _runs_already(file)) as lock:
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        yield


def _runs_already(lock: Path) -> ConfigurationError:
    return ConfigurationError(
        f"{lock.parent}: process {lock.read_text().strip() or '?'} is running a flow on this state "
        "folder; wait until it ends, or set FALAJ_HOME to another folder"
    )


def client_environment(home: Path, port: int) -> dict[str, str]:
    """What Prefect reads in this process; to be set before Prefect is imported."""
    return prefect_settings(home / "prefect", f"http://127.0.0.1:{port}/api")


def server_environment(caller: Mapping[str, str]) -> dict[str, str]:
    """What the server sees of its caller's environment: no secrets of stores and databases."""
    return {
        name: value
        for name, value in caller.items()
        if name in SERVER_VARIABLES or (name.startswith("PREFECT_") and name != "PREFECT_API_URL")
    }


@contextmanager
def prefect_server(home: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a Prefect server on loopback and stop it, with all it started, in the end.

    It runs under the guard process, so it also goes when this process is killed. It may not be
    ready yet: see `wait_until_ready`.
    """
    from tasks.kernel import guard

    folder = home / "prefect"
    with refused_writes_explained(folder):
        make_folder(folder)
        log = (folder / "server.log").open("ab")
    environment = {
        **server_environment(os.environ),
        **SERVER_ENVIRONMENT,
        "PREFECT_HOME": str(folder),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder / 'prefect.db'}",
        "DO_NOT_TRACK": "1",
    }
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "--factory",
        "infra.platform.apps:create_prefect",
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    with (
        log,
        subprocess.Popen(
            [sys.executable, "-S", guard.__file__, str(os.getpid()), "5", "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            # Ctrl-C is for the flow, which needs the server until it has ended.
            process_group=0,
        ) as server,
    ):
        try:
            yield server
        finally:
            server.terminate()
            try:
                server.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()


def wait_until_ready(server: subprocess.Popen[bytes], home: Path, port: int) -> None:
    """Wait until the server answers.

    Raises:
        TransientError: it ended, or did not answer in time.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    log = home / "prefect" / "server.log"
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise TransientError(
                f"the embedded Prefect server ended with code {server.returncode} before it was "
                f"ready; its log is {log}. Run again; if it repeats, set PREFECT_API_URL to a "
                "server of your own"
            )
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=2):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise TransientError(
        f"the embedded Prefect server did not answer within {START_TIMEOUT_S} s; its log is {log}"
    )


def send_what_is_left() -> None:
    """Hand logs and events that still wait in this process to the server, before it is stopped."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=FLUSH_TIMEOUT_S)
    EventsWorker.drain_all(timeout=FLUSH_TIMEOUT_S)


def free_port() -> int:
    """A TCP port that was free on loopback a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
