"""Flows that tell of which hardware class they run, with real deployments and workers."""

import os
import time
from pathlib import Path

from prefect import flow

from flows.stages import FOUND, Stages
from tasks.contracts.base import Contract
from tasks.contracts.hardware import CLASS_VARIABLE
from tasks.control.config import LeaseRequest, RoutingConfig, StageLease
from tasks.control.leases.devices import HostDevices
from tasks.control.leases.task import leased
from tasks.conversion.config import ConversionConfig, HardwareConversion
from tasks.kernel.settings import Settings


class Seen(Contract):
    """What a stage saw."""

    of_class: str
    leased_cores: int
    gpus: tuple[str, ...]
    converts_for: str
    formats: tuple[str, ...]


@flow(name="of-class", **FOUND)
def of_class_flow(hardware: HardwareConversion | None = None) -> Seen:
    """Tell the class, hold a lease there, and say what a conversion would make."""
    conversion = ConversionConfig().on(hardware)
    with leased(LeaseRequest(cores=1), StageLease(wait_s=60)) as lease:
        assert lease is not None
        return Seen(
            of_class=os.environ[CLASS_VARIABLE],
            leased_cores=len(lease.grant.cores),
            gpus=tuple(gpu.uuid for gpu in HostDevices.of_this_process().gpus),
            converts_for=conversion.hardware_class,
            formats=conversion.formats,
        )


@flow(name="on-class", persist_result=False)
def on_class_flow(routing: RoutingConfig) -> tuple[Seen, str]:
    """One stage where the routing wants it; what it saw and the deployment that was taken."""
    stages = Stages("own-class", routing, Settings.from_environment().store)
    seen = stages.run("conversion", of_class_flow)
    route = stages.times[0].route
    assert route is not None
    return seen, route.taken


@flow(name="busy", **FOUND)
def busy_flow(number: int, seconds: float, journal: str) -> None:
    """Be busy for some seconds, and note its beginning and its end."""
    with Path(journal).open("a") as file:
        file.write(f"{number} begins\n")
        file.flush()
        time.sleep(seconds)
        file.write(f"{number}\n")
