"""What Prefect's servers and clients read, and whether a platform runs on a state folder.

Imports nothing of Prefect: what it returns must be in the environment before Prefect is imported.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import is_held, locked, read_yaml

RESULTS = "falaj-results/state"
"""Block of Prefect that keeps results; see `tasks.control.routing.task.SharedResults`."""
ASK_AGAIN_CODES = "500"
"""The server answers so while its database or its Redis is away. By itself Prefect's client asks
again only when the server is away or busy, so a restart of PostgreSQL would end every run that says
something just then. What is asked may be asked twice: runs are made with idempotency keys."""

BASE_VARIABLES = frozenset(
    "PATH HOME USER LOGNAME LANG TZ TMPDIR LD_LIBRARY_PATH LD_PRELOAD SSL_CERT_FILE SSL_CERT_DIR "
    "PGSSLMINPROTOCOLVERSION HTTP_PROXY HTTPS_PROXY NO_PROXY "
    "http_proxy https_proxy no_proxy".split()
)
"""What a server inherits: nothing that may hold a secret of somebody else."""


def server_settings(*parts: str) -> dict[str, str]:
    """What a Prefect server reads: parts of `prefect_server.yaml`, later ones over earlier ones."""
    file = Path(__file__).with_name("prefect_server.yaml")
    described = read_yaml(file, file.name)
    return {name: value for part in parts for name, value in described[part].items()}


def platform_folder(home: Path) -> Path:
    """Folder of the platform's own state under a state folder."""
    return home / "platform"


def is_running(home: Path) -> bool:
    """True while a supervisor lives: it holds a lock that the kernel frees when it dies."""
    return is_held(platform_folder(home) / "lock")


@contextmanager
def only_one(file: Path, does: str, wait_s: float) -> Iterator[None]:
    """Hold a lock whose file has the holder's process id.

    Raises:
        ConfigurationError: another process holds it: `does` says what it does with the folder.
    """

    def held() -> ConfigurationError:
        holder = file.read_text().strip() or "?"
        return ConfigurationError(f"{file.parent}: process {holder} {does}")

    with locked(file, wait_s=wait_s, held=held) as lock:
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        yield


def base_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What every server inherits."""
    return {
        name: value
        for name, value in environment.items()
        if name in BASE_VARIABLES or name.startswith("LC_")
    }


def read_password(folder: Path, name: str = "secret") -> str | None:
    """The line `user:password` of a platform; None where it has none."""
    try:
        return (folder / name).read_text().strip() or None
    except FileNotFoundError:
        return None


def client_settings(
    home: Path, api_url: str, password: str | None, ui_url: str | None = None
) -> dict[str, str]:
    """The settings of every client of a platform: commands, workers and the runs they start.

    Args:
        home: the state folder.
        api_url: address that ends in `/api`.
        password: the line `user:password`; None: the server asks for none.
        ui_url: what links to the UI begin with; None: the API's address.
    """
    settings = prefect_settings(platform_folder(home) / "prefect", api_url) | {
        "FALAJ_HOME": str(home),
        "PREFECT_CLIENT_RETRY_EXTRA_CODES": ASK_AGAIN_CODES,
    }
    if ui_url:
        settings["PREFECT_UI_URL"] = ui_url
    if password:
        settings["PREFECT_API_AUTH_STRING"] = password
    return settings


def prefect_settings(folder: Path, api_url: str) -> dict[str, str]:
    """What Prefect reads in any process of ours; to be set before Prefect is imported.

    Args:
        folder: where Prefect keeps its own files.
        api_url: address that ends in `/api`.
    """
    return {
        "PREFECT_HOME": str(folder),
        "PREFECT_API_URL": api_url,
        "PREFECT_DEFAULT_RESULT_STORAGE_BLOCK": RESULTS,
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_LOGGING_SETTINGS_PATH": str(Path(__file__).with_name("logging.yml")),
        "PREFECT_LOGGING_EXTRA_LOGGERS": "tasks",
        "PREFECT_CLI_PROMPT": "false",
        "DO_NOT_TRACK": "1",
    }


def server_command(factory: str, host: str, port: int) -> tuple[str, ...]:
    """Uvicorn with an application of `infra.platform.apps`."""
    command = (sys.executable, "-m", "uvicorn", "--factory", f"infra.platform.apps:{factory}")
    options = ("--log-level", "warning", "--timeout-keep-alive", "30")
    return (*command, "--host", host, "--port", str(port), *options)
