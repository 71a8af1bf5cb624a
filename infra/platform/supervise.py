"""The process that `up` leaves behind: makes the services and keeps them alive."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from infra.gateway.service import EDGE
from infra.platform.children import Child
from infra.platform.clock import NOTICED_S, forget_planned_runs
from infra.platform.config import Place, PlatformConfig, stored_config
from infra.platform.cut_off import end_cut_off_if_possible
from infra.platform.down import resume_pools
from infra.platform.ports import choose_ports
from infra.platform.secret import ensure_password
from infra.platform.services import DEPLOYING, MLFLOW, SERVER, SERVING, Plan, make_services
from infra.platform.state import (
    CutRun,
    Endpoint,
    now,
    only_supervisor,
    paused_pools,
    read_state,
)
from infra.platform.supervisor import Supervisor
from tasks.control.leases.hardware import hardware_classes
from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.kernel.settings import private_folder, write_atomically

LOGGER = logging.getLogger(__name__)

STOPPED = "the platform was stopped"


def supervise(place: Place) -> None:
    """Run the platform until a stop signal.

    Its configuration is the one that `up` has stored; without one, the default.

    Raises:
        ConfigurationError: another supervisor lives, or the profile lacks an address.
    """
    private_folder(place.folder)
    private_folder(place.prefect)
    with only_supervisor(place):
        _log_to_standard_error()
        place.endpoint.unlink(missing_ok=True)
        plan = make_plan(place, stored_config(place))
        try:
            make_supervisor(plan).run()
        finally:
            place.endpoint.unlink(missing_ok=True)


def make_plan(place: Place, config: PlatformConfig) -> Plan:
    """Choose ports and find password and hardware."""
    return Plan(
        place=place,
        config=config,
        ports=choose_ports(config, place),
        password=ensure_password(place)[0] if config.password else None,
        environment=dict(os.environ),
        classes=hardware_classes(),
    )


def make_supervisor(plan: Plan) -> Supervisor:
    """The supervisor of all services: workers go first when it stops, then what they need."""
    children = [
        Child(service, plan.place.log(service.name), plan.config.stop_grace_s)
        for service in make_services(plan)
    ]
    servers = {SERVER, MLFLOW}
    others = {child.service.name for child in children} - servers

    def after_group(number: int) -> Sequence[CutRun]:
        if number:
            return ()
        workers = {pool: plan.place.worker_name(pool) for pool in plan.pools}
        return end_cut_off_if_possible(plan.api, workers, STOPPED)

    paused = paused_pools(plan.place)  # before this start: what `down` pauses later stays paused

    def on_up(name: str) -> None:
        if name == SERVER:
            write_endpoint(plan)
        if paused and plan.place.endpoint.exists() and _resumed(plan):
            paused.clear()

    return Supervisor(
        place=plan.place,
        config=plan.config,
        children=children,
        stop_order=(frozenset(others), frozenset(servers)),
        after_group=after_group,
        on_up=on_up,
        planner=SERVER,
        forget_plans=lambda: forget_planned_runs(plan.api),
        plans_are_wrong=_has_written_in_the_future(plan.place),
        remarks=plan.ports.remarks,
    )


def _resumed(plan: Plan) -> bool:
    """Let pools hand out runs again; False where it is to be tried with the next service."""
    try:
        resume_pools(plan.api, plan.place)
    except (TransientError, ConfigurationError) as exc:
        LOGGER.warning("the pools that going down had paused are not resumed yet: %s", exc)
        return False
    return True


def _has_written_in_the_future(place: Place) -> bool:
    """True where the clock was set back since the platform ran last, as after a power cut."""
    state = read_state(place)
    return state is not None and (state.written - now()).total_seconds() >= NOTICED_S


def write_endpoint(plan: Plan) -> None:
    """Tell commands where the platform answers."""
    endpoint = Endpoint(
        api_url=plan.api.url,
        ui_url=plan.ui_url,
        mlflow_url=plan.mlflow_url,
        local_mlflow_url=plan.local_mlflow_url,
        pid=os.getpid(),
        profile=plan.config.profile,
        serving_url=plan.serving_url if plan.config.serving else None,
    )
    write_atomically(plan.place.endpoint, endpoint.model_dump_json(indent=1))


def service_names(pools: Sequence[str]) -> list[str]:
    """Names of all services, as their logs are called."""
    return [SERVER, MLFLOW, DEPLOYING, *(f"worker-{pool}" for pool in pools), SERVING, EDGE]


def _log_to_standard_error() -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s  %(levelname)-7s %(message)s",
    )
