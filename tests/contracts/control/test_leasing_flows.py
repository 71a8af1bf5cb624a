"""Leases inside flows, on a real Prefect server: seen while they wait."""

import os
import threading
from contextvars import copy_context
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client

from tasks.control.config import LeaseRequest, StageLease
from tasks.control.leases.devices import HostDevices
from tasks.control.leases.placement import Claim
from tasks.control.leases.repository import LeaseRepository, acquire
from tasks.control.leases.task import leased, training_request
from tasks.kernel.settings import Settings
from tests.support.host.processes import run_python, wait_until
from tests.support.services.prefect_platform import shown

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("on_prefect")]

ALL = LeaseRequest(cores=len(os.sched_getaffinity(0)))


def facts(settings: Settings) -> list[Claim]:
    return LeaseRepository(settings.leases_path).claims()


@flow(name="leased-work")
def leased_work(policy: StageLease) -> dict[str, str]:
    with leased(ALL, policy) as lease:
        program = "import os; print(os.environ['OMP_NUM_THREADS'])"
        threads = run_python("-c", program, check=True).stdout.strip()
        return {"grant": str(lease.grant), "threads": threads}


def test_a_flow_waits_in_sight_and_holds_under_its_runs_name(settings: Settings) -> None:
    other = acquire(LeaseRepository(settings.leases_path), LeaseRequest(cores=1), "somebody else")
    seen, before = list[Claim](), len(shown("devices"))  # of other tests too

    def look_and_release() -> None:
        try:
            wait_until(lambda: len(shown("devices")) > before, "the flow to say that it waits", 120)
            seen.extend(facts(settings))
        finally:
            other.release()

    thread = threading.Thread(target=copy_context().run, args=(look_and_release,))
    thread.start()
    result = leased_work(StageLease())
    thread.join()
    assert result == {"grant": f"core(s) {cores()}", "threads": str(ALL.cores)}
    held, waiting = seen
    assert (held.holder, waiting.grant) == ("somebody else", None)
    name, _, run_id = waiting.holder.removesuffix(")").partition(" (")
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(UUID(run_id)).name == name
    seen_there = shown("devices", UUID(run_id))
    assert {str(each.data).split()[0] for each in seen_there} == {"Waits", "Holds"}
    assert facts(settings) == []


def cores() -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


def test_a_policy_may_say_that_no_lease_is_needed(settings: Settings) -> None:
    @flow(name="needs-no-lease")
    def free() -> bool:
        with leased(ALL, StageLease(enabled=False)) as lease:
            return lease is None

    assert free()
    assert not settings.leases_path.exists()


def test_a_training_asks_for_all_it_may_use_unless_configured() -> None:
    some = LeaseRequest(cores=1, gpus=1)
    assert training_request(StageLease(request=some), "cuda", 1) == some
    everything = training_request(StageLease(), "cpu", 1)
    assert everything == LeaseRequest(cores=HostDevices.of_this_process().num_cores)
    assert training_request(StageLease(), "cuda", 1).gpus == 1
