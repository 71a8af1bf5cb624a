"""`status`: what runs, as a table and as JSON."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from flows.client import is_running, read_password
from infra.platform.api import PrefectApi, answers
from infra.platform.config import Place
from infra.platform.services import MLFLOW, SERVER
from infra.platform.state import (
    Endpoint,
    PlatformState,
    ServiceState,
    now,
    read_endpoint,
    read_state,
)
from tasks.errors import ConfigurationError, TransientError

EXIT_WELL, EXIT_DOWN, EXIT_NOT_RUNNING = 0, 1, 3
WELL = ("up", "done")


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
        wrong: one sentence for each thing that is not well.
    """

    model_config = ConfigDict(frozen=True)

    running: bool
    phase: str
    home: Path
    endpoint: Endpoint | None = None
    services: tuple[ServiceState, ...] = ()
    pools: tuple[PoolStatus, ...] = ()
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
    if not is_running(place.home):
        killed = state is not None and state.phase != "stopped"
        return Status(running=False, phase="dead" if killed else "down", home=place.home)
    if state is None:
        return Status(
            running=True, phase="starting", home=place.home, wrong=("nothing has started yet",)
        )
    endpoint = read_endpoint(place)
    wrong = _wrong_services(state, place)
    pools, more = _pools(endpoint, place)
    if state.phase != "up":
        wrong.append(f"the platform is {state.phase}")
    return Status(
        running=True,
        phase=state.phase,
        home=place.home,
        endpoint=endpoint,
        services=state.services,
        pools=pools,
        wrong=tuple([*wrong, *more]),
    )


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
    if not answers(f"{endpoint.mlflow_url}/health"):
        wrong.append(f"{MLFLOW} does not answer at {endpoint.mlflow_url}")
    api = PrefectApi(endpoint.api_url, read_password(place.folder))
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
    except (TransientError, ConfigurationError) as exc:
        return (), [*wrong, str(exc)]
    return pools, wrong


def table(status: Status) -> str:
    """The status for a person."""
    if not status.running:
        remark = " It was killed; make up starts it anew." if status.phase == "dead" else ""
        return f"No platform runs on {status.home}.{remark}"
    lines = [f"{'State':<12}{status.phase}, on {status.home}"]
    if status.endpoint:
        lines.append(f"{'Prefect':<12}{status.endpoint.ui_url}")
        lines.append(f"{'MLflow':<12}{status.endpoint.mlflow_url}")
    lines += ["", f"{'Service':<24}{'Condition':<12}{'Since':<10}{'Restarts':>8}  Detail"]
    lines += [_service_line(service) for service in status.services]
    if status.pools:
        lines += ["", f"{'Pool':<24}{'Workers online':<16}Hands out runs"]
        lines += [
            f"{pool.name:<24}{pool.online:<16}{'no, it is paused' if pool.paused else 'yes'}"
            for pool in status.pools
        ]
    lines += ["", *(status.wrong or ("All is well.",))]
    return "\n".join(lines)


def _service_line(service: ServiceState) -> str:
    seconds = (now() - service.since).total_seconds()
    age = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    detail = service.detail if len(service.detail) < 60 else service.detail[:57] + "..."
    return f"{service.name:<24}{service.condition:<12}{age:<10}{service.restarts:>8}  {detail}"
