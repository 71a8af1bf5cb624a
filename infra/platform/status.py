"""`status`: what runs, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from infra.orchestration.client import is_running, read_password
from infra.platform.api import PROBE_TIMEOUT_S, PrefectApi, answers
from infra.platform.config import Place, kept_options
from infra.platform.services import MLFLOW, SERVER
from infra.platform.state import (
    Endpoint,
    PlatformState,
    ServiceState,
    now,
    paused_pools,
    read_endpoint,
    read_state,
)
from tasks.control.leases.book import LeaseBook, LeaseFacts
from tasks.control.recovery.config import RecoveryConfig
from tasks.kernel.errors import ConfigurationError, StorageError, TransientError
from tasks.kernel.settings import Settings

EXIT_WELL, EXIT_DOWN, EXIT_NOT_RUNNING = 0, 1, 3
WELL = ("up", "done")
LATE_AFTER = timedelta(seconds=60)
GIVEN_UP_SHOWN = timedelta(days=1)


class PoolStatus(BaseModel):
    """A work pool, and how many of its workers are online, on any machine."""

    model_config = ConfigDict(frozen=True)

    name: str
    type: str
    paused: bool
    online: int


class Status(BaseModel):
    """The platform as it is now.

    Attributes:
        running: a supervisor lives.
        phase: what it is doing; `dead` where one was killed.
        leases: who holds devices and who waits for them, on all hosts that share the database.
        options: with which it runs, or ran last; later starts have them too.
        wrong: one sentence for each thing that is not well.
    """

    model_config = ConfigDict(frozen=True)

    running: bool
    phase: str
    home: Path
    options: dict[str, str] = {}
    endpoint: Endpoint | None = None
    services: tuple[ServiceState, ...] = ()
    pools: tuple[PoolStatus, ...] = ()
    leases: tuple[LeaseFacts, ...] = ()
    wrong: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 all well, 1 something is down, 3 not running."""
        if not self.running:
            return EXIT_NOT_RUNNING
        return EXIT_DOWN if self.wrong else EXIT_WELL


def read_status(place: Place) -> Status:
    """Ask the supervisor's files, and the servers themselves."""
    state = read_state(place)
    options = {name: str(value) for name, value in kept_options(place).items()}
    leases, troubles = _leases(place)
    if not is_running(place.home):
        killed = state is not None and state.phase != "stopped"
        return Status(
            running=False,
            phase="dead" if killed else "down",
            home=place.home,
            options=options,
            leases=leases,
            wrong=troubles,
        )
    if state is None:
        return Status(
            running=True,
            phase="starting",
            home=place.home,
            options=options,
            wrong=("nothing has started yet",),
        )
    endpoint = read_endpoint(place)
    wrong = _wrong_services(state, place)
    pools, more = _pools(endpoint, place)
    if paused := paused_pools(place):
        wrong.append(
            f"going down has paused the pools {', '.join(paused)}, and their runs wait; make up "
            "resumes them"
        )
    if state.phase != "up":
        wrong.append(f"the platform is {state.phase}")
    return Status(
        running=True,
        phase=state.phase,
        home=place.home,
        options=options,
        endpoint=endpoint,
        services=state.services,
        pools=pools,
        leases=leases,
        wrong=(*wrong, *more, *troubles),
    )


def _leases(place: Place) -> tuple[tuple[LeaseFacts, ...], tuple[str, ...]]:
    """The book of leases, and what is wrong with it; no database is made by looking."""
    settings = replace(Settings.from_environment(), home=place.home)
    if settings.database_url is None and not settings.operation_file.exists():
        return (), ()
    try:
        return tuple(LeaseBook(settings.operation_url).facts()), ()
    except (TransientError, StorageError, ConfigurationError) as exc:
        return (), (f"the leases of devices cannot be read: {exc}",)


def _wrong_services(state: PlatformState, place: Place) -> list[str]:
    return [
        f"{service.name} is {service.condition}"
        f"{': ' * bool(service.detail)}{service.detail}; its log is {place.log(service.name)}"
        for service in state.services
        if service.condition not in WELL
    ]


def _pools(endpoint: Endpoint | None, place: Place) -> tuple[tuple[PoolStatus, ...], list[str]]:
    """The pools as the server sees them, and what is wrong with them and with the servers."""
    if endpoint is None:
        return (), [f"{SERVER} has not answered yet"]
    wrong = []
    if not answers(f"{endpoint.local_mlflow_url}/health"):
        wrong.append(f"{MLFLOW} does not answer at {endpoint.local_mlflow_url}")
    api = PrefectApi(endpoint.api_url, read_password(place.folder), PROBE_TIMEOUT_S)
    try:
        pools = tuple(
            PoolStatus(
                name=pool["name"],
                type=pool["type"],
                paused=pool["is_paused"],
                online=sum(worker["status"] == "ONLINE" for worker in api.workers(pool["name"])),
            )
            for pool in api.pools()
        )
        wrong += waiting_for_workers(api, [pool.name for pool in pools if not pool.online])
        wrong += given_up(api)
    except (TransientError, ConfigurationError) as exc:
        return (), [*wrong, str(exc)]
    return pools, wrong


def waiting_for_workers(api: PrefectApi, pools: Sequence[str]) -> list[str]:
    """Runs that are late because their pool has no worker; one sentence for each pool."""
    due_before = (now() - LATE_AFTER).isoformat()
    waiting: dict[str, list[dict[str, Any]]] = {}
    for run in api.waiting_runs(pools, due_before) if pools else ():
        waiting.setdefault(str(run["work_pool_name"]), []).append(run)
    return [
        f"{len(runs)} run{'s' * (len(runs) > 1)} of work pool {pool!r} "
        f"wait{'s' * (len(runs) == 1)} for a worker, and none is online: {first['name']} was due "
        f"{_age(datetime.fromisoformat(first['expected_start_time']))} ago. Start one on a machine "
        f"with the hardware: prefect worker start --pool {pool}"
        for pool, runs in sorted(waiting.items())
        for first in [min(runs, key=lambda run: str(run["expected_start_time"]))]
    ]


def given_up(api: PrefectApi) -> list[str]:
    """Runs that were cut off so often that nobody starts them again."""
    most = RecoveryConfig().max_retries + 1
    return [
        f"run {run['name']} was cut off {run['run_count']} times, last "
        f"{_age(datetime.fromisoformat(run['end_time']))} ago, and is not started again. Its log "
        f"says what it was doing; to go on: python -m flows --on-platform retry {run['name']}"
        for run in api.crashed_runs((now() - GIVEN_UP_SHOWN).isoformat())
        if run["run_count"] >= most
    ]


def table(status: Status) -> str:
    """The status for a person."""
    if not status.running:
        remark = " It was killed; make up starts it anew." if status.phase == "dead" else ""
        first = f"No platform runs on {status.home}.{remark}"
        told = (*_option_lines(status.options), *_lease_lines(status.leases), *status.wrong)
        return "\n".join([first, *told])
    lines = [f"{'State':<12}{status.phase}, on {status.home}", *_option_lines(status.options)]
    if status.endpoint:
        lines.append(f"{'Prefect':<12}{status.endpoint.ui_url}")
        lines.append(f"{'MLflow':<12}{status.endpoint.mlflow_url}")
        if status.endpoint.serving_url:
            lines.append(f"{'Serving':<12}{status.endpoint.serving_url}")
    lines += ["", f"{'Service':<24}{'Condition':<12}{'Since':<10}{'Restarts':>8}  Detail"]
    lines += [_service_line(service) for service in status.services]
    if status.pools:
        lines += ["", f"{'Pool':<24}{'Workers online':<16}Hands out runs"]
        lines += [
            f"{pool.name:<24}{pool.online:<16}{'no, it is paused' if pool.paused else 'yes'}"
            for pool in status.pools
        ]
    lines += _lease_lines(status.leases)
    lines += ["", *(status.wrong or ("All is well.",))]
    return "\n".join(lines)


def _option_lines(options: Mapping[str, str]) -> list[str]:
    if not options:
        return []
    named = ", ".join(f"{name}={value}" for name, value in options.items())
    return [f"{'Options':<12}{named}; kept for each start, dropped by make up UP_ARGS=--reset"]


def _lease_lines(leases: Sequence[LeaseFacts]) -> list[str]:
    """Who holds what and who waits, host by host; nothing where nobody does."""
    if not leases:
        return []
    lines = ["", f"{'Devices of':<24}{'State':<12}{'Since':<10}{'Priority':>8}  What, and for whom"]
    return lines + [
        f"{lease.host[:23]:<24}{lease.state:<12}{_age(lease.since):<10}{lease.priority:>8}  "
        f"{lease.devices}: {lease.holder}, process {lease.pid}"
        for lease in leases
    ]


def _age(since: datetime) -> str:
    seconds = max(0.0, (now() - since).total_seconds())
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def _service_line(service: ServiceState) -> str:
    age = _age(service.since)
    detail = service.detail if len(service.detail) < 60 else service.detail[:57] + "..."
    return f"{service.name:<24}{service.condition:<12}{age:<10}{service.restarts:>8}  {detail}"
