"""`up`: start the supervisor, detached, and tell how its services become ready."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.orchestration.client import is_running, read_password
from infra.platform.api import PrefectApi
from infra.platform.checks import refuse_wrong_pins
from infra.platform.config import Place, PlatformConfig, stored_config
from infra.platform.down import resume_pools
from infra.platform.rotation import rotate, tail
from infra.platform.secret import ensure_password
from infra.platform.services import DEPLOYING, database_url, redis_url
from infra.platform.state import (
    PlatformState,
    ServiceState,
    paused_pools,
    read_endpoint,
    read_state,
)
from tasks.kernel.disk import require_space
from tasks.kernel.errors import (
    ConfigurationError,
    FalajError,
    TransientError,
    refused_writes_explained,
)
from tasks.kernel.settings import PROJECT_ROOT, make_folder, private_folder, write_atomically

START_LIMIT_S = 600.0
POLL_S = 0.2
LINES_SHOWN = 12
RESTARTS_TOLERATED = 4
SUPERVISOR = "supervisor"


class NotUpError(FalajError):
    """The platform did not come up; the text says what did not, and where to look."""


def bring_up(place: Place, config: PlatformConfig, environment: dict[str, str]) -> None:
    """Start the platform and wait until all of it is ready; harmless where it runs.

    Raises:
        ConfigurationError: it runs with another configuration, or the configuration is wrong.
        NotUpError: a service did not become ready; the supervisor goes on trying.
        StorageError: there is too little space on its disk.
    """
    private_folder(place.folder)
    paused = paused_pools(place)
    with _one_at_a_time(place):
        process = None if is_running(place.home) else _begin(place, config, environment)
    if process is None:
        _require_same(place, config)
        print("The platform is running already; nothing was started.")
    state = read_state(place)
    if process or state is None or state.phase != "up":
        _wait_until_up(place, process)
    _resume_pools(place, paused)
    _tell_where(place, config)


def _begin(
    place: Place, config: PlatformConfig, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start the supervisor, and wait until everybody can see that it lives."""
    refuse_wrong_pins()
    require_space(place.home)
    database_url(config, environment), redis_url(config, environment)
    made = ensure_password(place)[1] if config.password else False
    write_atomically(place.config, config.model_dump_json(indent=1))
    place.state.unlink(missing_ok=True)
    process = _start_supervisor(place, environment)
    if made:
        _show_password(place)
    print(f"Starting the platform ({config.profile}) on {place.home}", flush=True)
    while process.poll() is None and not is_running(place.home):
        time.sleep(POLL_S)
    return process


@contextmanager
def _one_at_a_time(place: Place) -> Iterator[None]:
    """Two that start a platform at once would each make a password, and one would be wrong."""
    with refused_writes_explained(place.folder):
        lock = place.start_lock.open("a")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _require_same(place: Place, config: PlatformConfig) -> None:
    running = stored_config(place).model_dump()
    wanted = config.model_dump()
    different = [
        f"{name}={value} (wanted: {wanted[name]})"
        for name, value in running.items()
        if value != wanted[name]
    ]
    if different:
        raise ConfigurationError(
            f"the platform on {place.home} runs with {', '.join(different)}. Nothing was changed; "
            "to run it otherwise: make down, then make up again"
        )


def _start_supervisor(place: Place, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    log = place.log(SUPERVISOR)
    make_folder(log.parent)
    rotate(log, stored_config(place).log_limit_bytes, stored_config(place).log_keep)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "infra.platform", "--home", str(place.home), "supervise"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**environment, "FALAJ_HOME": str(place.home)},
            cwd=PROJECT_ROOT,
            start_new_session=True,  # the terminal's Ctrl-C and its end are not for it
        )


def _show_password(place: Place) -> None:
    print(
        "\n".join(
            [
                "",
                f"  Login  {read_password(place.folder)}",
                "  Prefect's login page has one field: paste this whole line. MLflow asks for user",
                "  and password apart: what is before the colon, and what is after it.",
                f"  It is shown this once, and kept in {place.secret}",
                "",
            ]
        )
    )


def _wait_until_up(place: Place, supervisor: subprocess.Popen[bytes] | None) -> None:
    """Print a line for each service that becomes ready, until all are.

    Args:
        place: the platform's.
        supervisor: None where another command has started it.

    Raises:
        NotUpError: one is not, and why.
    """
    started = time.monotonic()
    told: set[str] = set()
    deploying = place.log(DEPLOYING)
    began = deploying.stat().st_size if deploying.exists() else 0
    while True:
        state = read_state(place)
        ended = supervisor.poll() is not None if supervisor else not is_running(place.home)
        for service in state.services if state else ():
            if service.name not in told and service.condition in ("up", "done", "failed"):
                told.add(service.name)
                _tell_service(service, time.monotonic() - started, _said(deploying, began))
        if state and state.phase == "up":
            _require_well(place, state)
            return
        if state and state.phase == "stopping":
            raise NotUpError("the platform is going down; when it is down: make up")
        if ended:
            raise NotUpError(_why_ended(place, supervisor.returncode if supervisor else None))
        _require_progress(place, state, time.monotonic() - started)
        time.sleep(POLL_S)


def _tell_service(service: ServiceState, seconds: float, deployed: list[str]) -> None:
    print(f"  {service.name:<22}{service.condition:<8}after {seconds:.0f} s", flush=True)
    if service.name == DEPLOYING:
        for line in deployed:
            print(textwrap.fill(line, 100, initial_indent=" " * 6, subsequent_indent=" " * 17))


def _said(log: Path, began: int) -> list[str]:
    """What deploying has said since a place in its log: all but what it wrote, which is counted."""
    lines = tail(log, LINES_SHOWN, since=began)
    return [line for line in lines if not line.startswith("written ")] or lines[-1:]


def _require_well(place: Place, state: PlatformState) -> None:
    failed = [service for service in state.services if service.condition == "failed"]
    if failed:
        raise NotUpError(
            f"{failed[0].name} failed ({failed[0].detail}); its last lines are above, its log is "
            f"{place.log(failed[0].name)}. The servers and workers run on. Mend it, then run: "
            "make down, make up"
        )


def _require_progress(place: Place, state: PlatformState | None, seconds: float) -> None:
    for service in state.services if state else ():
        if service.restarts >= RESTARTS_TOLERATED:
            lines = "\n".join(tail(place.log(service.name), LINES_SHOWN))
            raise NotUpError(
                f"{service.name} was started {service.restarts} times and ended each time "
                f"({service.detail}). The supervisor goes on trying: make status shows it, make "
                f"down ends it. Its log, {place.log(service.name)}, ends with:\n{lines}"
            )
    if seconds > START_LIMIT_S:
        raise NotUpError(
            f"not all is ready after {seconds:.0f} s; the supervisor goes on. make status shows "
            f"what is missing; the logs are in {place.log('any').parent}"
        )


def _why_ended(place: Place, code: int | None) -> str:
    lines = "\n".join(tail(place.log(SUPERVISOR), LINES_SHOWN))
    how = "" if code is None else f" with code {code}"
    return f"the supervisor ended{how}. {place.log(SUPERVISOR)} ends with:\n{lines}"


def _resume_pools(place: Place, paused: list[str]) -> None:
    """Resume what a `down` had paused that was killed, and tell of what the start has resumed."""
    endpoint = read_endpoint(place)
    if not paused or endpoint is None:
        return
    try:
        resume_pools(PrefectApi(endpoint.api_url, read_password(place.folder)), place)
    except (TransientError, ConfigurationError) as exc:
        raise NotUpError(
            f"the pools {', '.join(paused)}, which going down had paused, cannot be resumed: {exc}"
        ) from exc
    print(f"Resumed the pools that going down had paused: {', '.join(paused)}")


def _tell_where(place: Place, config: PlatformConfig) -> None:
    endpoint, state = read_endpoint(place), read_state(place)
    if endpoint is None or state is None:
        return
    print()
    for remark in state.remarks:
        print(remark)
    print(f"{'Prefect':<10}{endpoint.ui_url}")
    print(f"{'MLflow':<10}{endpoint.mlflow_url}")
    if endpoint.serving_url:
        print(f"{'Serving':<10}{endpoint.serving_url}")
    if config.password:
        print(f"{'Password':<10}in {place.secret}; Prefect's login takes its whole line")
    else:
        print(f"{'Password':<10}none: every user of this machine can run code through the API")
    print(f"{'Logs':<10}{place.log('any').parent}")
    if not [*place.home.glob("reports/latest"), *place.home.glob("use_cases/*/reports/latest")]:
        print(f"{'Next':<10}nothing has been trained on this state folder yet. In Prefect's UI:")
        print(f"{'':<10}Deployments, pipeline, Run, Quick run. Drift checks need its model")
    if endpoint.profile == "embedded" and not config.host.startswith("127."):
        print(f"Listening on {config.host} without TLS: put a proxy with TLS before it")


def log_file(place: Place, name: str) -> Path:
    """The log of one service.

    Raises:
        ConfigurationError: there is none of that name.
    """
    known = sorted(file.stem for file in place.log("any").parent.glob("*.log"))
    if name not in known:
        raise ConfigurationError(f"no log {name!r}; there are: {', '.join(known) or 'none yet'}")
    return place.log(name)
