"""Files of the platform: where they are, and the state that commands and the supervisor share."""

import hashlib
import json
import secrets
import socket
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, TypeAdapter, ValidationError

from infra.orchestration.client import (
    client_settings,
    is_running,
    only_one,
    platform_folder,
    read_password,
)
from tasks.governance.identity import creator_headers, current_subject, read_sign_in
from tasks.kernel.errors import ConfigurationError, NotRunningError
from tasks.kernel.files import machine_id, write_atomically
from tasks.kernel.provenance import code_commit
from tasks.kernel.values import Frozen

AS_CONFIGURED = "as configured"
LOCK_WAIT_S = 2.0
"""A command that tests whether the lock is held takes it for some microseconds."""

Value = TypeVar("Value", bound=BaseModel)
Phase = Literal["starting", "up", "stopping", "stopped"]
Condition = Literal["waiting", "starting", "up", "silent", "restarting", "done", "failed", "ended"]


class PlatformFiles:
    """Files of the platform of one state folder.

    Attributes:
        folder: `<home>/platform` where no other is named; readable by its owner alone.
        lock: held by the supervisor as long as it lives.
        start_lock: held by `up` while it starts a supervisor.
        endpoint: where the platform answers.
        state: the services, as the supervisor sees them.
        ports: ports chosen earlier.
        config: the configuration that the supervisor was started with.
        paused: pools that `down` has paused, to be resumed by `up`.
        secret: the line `user:password`, mode 600.
        prefect: Prefect's own folder: database, results, leases.
    """

    def __init__(self, home: Path, folder: Path | None = None) -> None:
        self.home = home
        self.folder = folder or platform_folder(home)
        self.lock = self.folder / "lock"
        self.start_lock = self.folder / "start_lock"
        self.endpoint = self.folder / "endpoint.json"
        self.state = self.folder / "state.json"
        self.ports = self.folder / "ports.json"
        self.config = self.folder / "config.json"
        self.paused = self.folder / "paused.json"
        self.secret = self.folder / "secret"
        self.prefect = self.folder / "prefect"
        self.logs = self.folder / "logs"

    def log(self, service: str) -> Path:
        """Log of one service."""
        return self.logs / f"{service}.log"

    def worker_name(self, pool: str) -> str:
        """Name of this platform's worker on a pool: the same after each start, unique among hosts.

        The worker's label on a run thus names its platform, also after a power cut.
        """
        here = machine_id(self.home).partition(".")[0]  # a network card may come and go
        digest = hashlib.sha256(f"{self.home} {here}".encode()).hexdigest()[:6]
        return f"{pool}@{socket.gethostname()}-{digest}"


class ServiceState(Frozen):
    """One service.

    Attributes:
        pid: of its guard; None while none runs.
        restarts: how often it has died and was started again.
        since: when it came into this condition.
        detail: the reason, in words.
    """

    name: str
    condition: Condition
    pid: int | None = None
    restarts: int = 0
    since: AwareDatetime
    detail: str = ""


class GroupState(Frozen):
    """How many there are of a service that may be there several times.

    Attributes:
        reason: of the last decision.
    """

    name: str
    count: int
    wanted: int
    reason: str

    @property
    def is_usual(self) -> bool:
        """True where there is one, because nobody has asked for anything else."""
        return (self.count, self.wanted, self.reason) == (1, 1, AS_CONFIGURED)


class CutRun(Frozen):
    """A run whose processes were ended before it had ended itself."""

    id: str
    name: str
    state: str


class PlatformState(Frozen):
    """The complete platform at one moment."""

    pid: int
    phase: Phase
    started: AwareDatetime
    written: AwareDatetime
    services: tuple[ServiceState, ...] = ()
    groups: tuple[GroupState, ...] = ()
    cut_off: tuple[CutRun, ...] = ()

    def service(self, name: str) -> ServiceState | None:
        """The service of that name."""
        return next((service for service in self.services if service.name == name), None)


class Endpoint(Frozen):
    """Where the platform answers.

    Attributes:
        api_url: Prefect's API, for processes of this machine.
        ui_url: Prefect's UI, for people.
        mlflow_url: MLflow, for people; run reports are beside it, under its password.
        local_mlflow_url: MLflow, for processes of this machine.
        serving_url: the inference server, for processes of this machine; None where none runs.
        code: commit or release that the platform was started from.
    """

    api_url: str
    ui_url: str
    mlflow_url: str
    local_mlflow_url: str
    pid: int
    profile: str
    serving_url: str | None = None
    code: str = ""


def write_state(files: PlatformFiles, state: PlatformState) -> None:
    """Publish the state."""
    write_atomically(files.state, state.model_dump_json(indent=1))


def read_state(files: PlatformFiles) -> PlatformState | None:
    """What was published last, also by a supervisor that is dead; None before the first."""
    return _read(files.state, PlatformState)


def read_endpoint(files: PlatformFiles) -> Endpoint | None:
    """Where the platform answers; None while its server has never answered."""
    return _read(files.endpoint, Endpoint)


def platform_environment(home: Path) -> dict[str, str] | None:
    """What Prefect reads in a command that is to use the platform of this state folder.

    It must be in the environment before Prefect is imported.

    Args:
        home: the state folder, as in `Settings.home`.

    Returns:
        Address, password and folders of Prefect; None where no platform runs, or where its server
        has not answered yet.

    Raises:
        ConfigurationError: a file of the platform was changed and says nothing any more.
    """
    files = PlatformFiles(home)
    endpoint = read_endpoint(files) if is_running(home) else None
    if endpoint is None:
        return None
    password = read_password(files.folder)
    found = client_settings(home, endpoint.api_url, password, endpoint.ui_url)
    if read_sign_in(home):  # runs that this command starts are its subject's
        told = creator_headers(current_subject(home).name)
        found["PREFECT_CLIENT_CUSTOM_HEADERS"] = json.dumps(told)
    return found


def running_platform(home: Path) -> dict[str, str]:
    """As `platform_environment`, for a command that was asked to use the platform.

    Raises:
        NotRunningError: none runs on this state folder, or its server has not answered yet.
    """
    environment = platform_environment(home)
    if environment is None:
        raise NotRunningError(
            f"no platform is ready on {home}; start it with make up, look with make status, or "
            "run the command without --on-platform"
        )
    return environment


def other_code(files: PlatformFiles) -> str | None:
    """The commit or release that a running platform was started from; None where it is this one."""
    endpoint = read_endpoint(files) if is_running(files.home) else None
    if endpoint is None or endpoint.code == code_commit():
        return None
    return endpoint.code or "a release that does not say which it is"


def read_ports(files: PlatformFiles) -> dict[str, int]:
    """Ports that the services got at the last start, by service; none before the first."""
    try:
        return TypeAdapter(dict[str, int]).validate_json(files.ports.read_bytes())
    except (FileNotFoundError, ValidationError):
        return {}


def _read(file: Path, kind: type[Value]) -> Value | None:
    try:
        return kind.model_validate_json(file.read_text())
    except FileNotFoundError:
        return None
    except ValidationError as exc:
        raise ConfigurationError(
            f"{file} was changed and cannot be read any more; make down, make up"
        ) from exc


def only_supervisor(files: PlatformFiles) -> AbstractContextManager[None]:
    """Be the one supervisor of this state folder.

    Raises:
        ConfigurationError: another one lives.
    """
    does = "supervises this state folder; make status shows it, make down ends it"
    return only_one(files.lock, does, wait_s=LOCK_WAIT_S)


def supervisor_pid(files: PlatformFiles) -> int | None:
    """Process id of the supervisor that holds the lock, as it wrote it there."""
    try:
        return int(files.lock.read_text())
    except (FileNotFoundError, ValueError):
        return None


def paused_pools(files: PlatformFiles) -> list[str]:
    """Pools that `down` has paused, and nobody has resumed."""
    try:
        return [str(name) for name in json.loads(files.paused.read_text())]
    except (FileNotFoundError, ValueError):
        return []


def ensure_password(files: PlatformFiles, name: str = "secret") -> tuple[str, bool]:
    """The line `user:password` of a file of the platform, and whether it was made just now.

    A file that others may read is closed to them.
    """
    if kept := read_password(files.folder, name):
        (files.folder / name).chmod(0o600)
        return kept, False
    made = f"admin:{secrets.token_urlsafe(18)}"
    write_atomically(files.folder / name, made + "\n", private=True)
    return made, True


def now() -> datetime:
    """This moment, UTC."""
    return datetime.now(UTC)
