"""The embedded default: a Prefect API of one's own while a flow runs, with its state in SQLite.

Where `PREFECT_API_URL` is set, that server is used and nothing is started.
"""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.orchestration import client
from infra.platform.api import answers
from tasks.kernel.errors import (
    ConfigurationError,
    DataContractError,
    StorageError,
    refused_writes_explained,
)
from tasks.kernel.files import lack_of_space, make_folder, require_space
from tasks.kernel.process import guarded_process, wait_until_ready
from tasks.kernel.settings import PROJECT_ROOT
from tasks.metadata.database import USED, held_everywhere

FLUSH_TIMEOUT_S = 10
LONGEST_REASON = 300


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
    does = (
        "is running a flow on this state folder; wait until it ends, or set FALAJ_HOME to another "
        "folder"
    )
    used = held_everywhere(home / USED, shared=True)
    with client.only_one(home / "run.lock", does, wait_s=0), used:
        yield


def client_environment(home: Path, port: int) -> dict[str, str]:
    """What Prefect reads in this process; to be set before Prefect is imported."""
    return client.prefect_settings(home / "prefect", f"http://127.0.0.1:{port}/api")


@contextmanager
def prefect_server(home: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a Prefect server on loopback and stop it, with all it started, in the end.

    It runs under the guard process, so it also goes when this process is killed. It may not be
    ready yet: see `wait_for_server`.
    """
    folder = home / "prefect"
    log = folder / "server.log"
    with refused_writes_explained(folder):
        make_folder(folder)
        log.touch()
    environment = {
        **client.base_environment(os.environ),
        **client.server_settings("every", "embedded"),
        "PREFECT_HOME": str(folder),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder / 'prefect.db'}",
    }
    command = client.server_command("create_prefect", "127.0.0.1", port)
    # Ctrl-C is for the flow, which needs the server until it has ended.
    with guarded_process(command, log, environment, folder=PROJECT_ROOT, own_group=True) as server:
        yield server


def wait_for_server(server: subprocess.Popen[bytes], home: Path, port: int) -> None:
    """Wait until the server answers.

    Raises:
        TransientError: it ended, or did not answer in time.
    """
    url, log = f"http://127.0.0.1:{port}/api/health", home / "prefect" / "server.log"
    wait_until_ready(server, lambda: answers(url), "the embedded Prefect server", log, 180)


@contextmanager
def flows_reported(*, watched: bool) -> Iterator[None]:
    """Run flows inside the block, with bars in a terminal; in the end all is with the server.

    Without heartbeats where nobody watches them: their thread delays the end of each flow by a
    second.
    """
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    from infra.orchestration.console import progress_shown

    unwatched = {} if watched else {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    with progress_shown(), temporary_settings(unwatched):
        try:
            yield
        finally:
            send_what_is_left()


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
