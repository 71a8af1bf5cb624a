"""What the supervisor says about itself and its services, in files that commands read."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from infra.platform.config import Place
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import write_atomically

LOCK_WAIT_S = 2.0
"""Whoever looks whether the lock is held takes it for some microseconds."""

Value = TypeVar("Value", bound=BaseModel)
Phase = Literal["starting", "up", "stopping", "stopped"]
Condition = Literal["waiting", "starting", "up", "silent", "restarting", "done", "failed", "ended"]


class ServiceState(BaseModel):
    """One service.

    Attributes:
        pid: of its guard; None while none runs.
        restarts: how often it has died and was started again.
        since: when it came into this condition.
        detail: the reason, in words.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    condition: Condition
    pid: int | None = None
    restarts: int = 0
    since: AwareDatetime
    detail: str = ""


class CutRun(BaseModel):
    """A run whose processes were ended before it had ended itself."""

    model_config = ConfigDict(frozen=True)

    id: str
    name: str
    state: str


class PlatformState(BaseModel):
    """The whole platform at one moment."""

    model_config = ConfigDict(frozen=True)

    pid: int
    phase: Phase
    started: AwareDatetime
    written: AwareDatetime
    services: tuple[ServiceState, ...] = ()
    remarks: tuple[str, ...] = ()
    cut_off: tuple[CutRun, ...] = ()

    def service(self, name: str) -> ServiceState | None:
        """The service of that name."""
        return next((service for service in self.services if service.name == name), None)


class Endpoint(BaseModel):
    """Where the platform answers.

    Attributes:
        api_url: Prefect's API, for processes of this machine.
        ui_url: Prefect's UI, for people.
        mlflow_url: MLflow, for people; run reports are beside it, under its password.
        local_mlflow_url: MLflow, for processes of this machine.
        serving_url: the inference server, for processes of this machine; None where none runs.
    """

    model_config = ConfigDict(frozen=True)

    api_url: str
    ui_url: str
    mlflow_url: str
    local_mlflow_url: str
    pid: int
    profile: str
    serving_url: str | None = None


def write_state(place: Place, state: PlatformState) -> None:
    """Publish the state."""
    write_atomically(place.state, state.model_dump_json(indent=1))


def read_state(place: Place) -> PlatformState | None:
    """What was published last, also by a supervisor that is dead; None before the first."""
    return _read(place.state, PlatformState)


def read_endpoint(place: Place) -> Endpoint | None:
    """Where the platform answers; None while its server has never answered."""
    return _read(place.endpoint, Endpoint)


def _read(file: Path, kind: type[Value]) -> Value | None:
    try:
        return kind.model_validate_json(file.read_text())
    except FileNotFoundError:
        return None
    except ValidationError as exc:
        raise ConfigurationError(
            f"{file} was changed and cannot be read any more; restart the platform: make down, "
            "make up"
        ) from exc


@contextmanager
def only_supervisor(place: Place) -> Iterator[None]:
    """Be the one supervisor of this state folder.

    Raises:
        ConfigurationError: another one lives.
    """
    with place.lock.open("a+") as lock:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as exc:
                if time.monotonic() > deadline:
                    lock.seek(0)
                    raise ConfigurationError(
                        f"{place.folder}: process {lock.read().strip() or '?'} supervises this "
                        "state folder; make status shows it, make down ends it"
                    ) from exc
                time.sleep(0.02)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def supervisor_pid(place: Place) -> int | None:
    """Process id of the supervisor that holds the lock, as it wrote it there."""
    try:
        return int(place.lock.read_text())
    except (FileNotFoundError, ValueError):
        return None


def remember_paused(place: Place, pools: list[str]) -> None:
    """Keep which pools going down has paused."""
    write_atomically(place.paused, json.dumps(sorted(pools)))


def paused_pools(place: Place) -> list[str]:
    """Pools that going down has paused, and nobody has resumed."""
    try:
        return [str(name) for name in json.loads(place.paused.read_text())]
    except (FileNotFoundError, ValueError):
        return []


def now() -> datetime:
    """This moment, UTC."""
    return datetime.now(UTC)
