from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import ValidationError

from tasks.control.config import LeaseRequest
from tasks.control.leases.devices import CoreSet, HostDevices
from tasks.control.leases.placement import AGEING_S, Claim, Grant, Taken, due_s, grants_for, place
from tasks.control.leases.repository import LeaseRepository, acquire
from tasks.kernel.cores import CoreLimit
from tasks.kernel.errors import ConfigurationError, LeaseError
from tests.support.platform.lease_devices import gpu, host


def claim(
    ticket: int,
    request: LeaseRequest,
    devices: HostDevices,
    *,
    asked_s: float = 0,
    priority: int = 3,
    grant: Grant | None = None,
) -> Claim:
    return Claim(
        lease_id=str(ticket),
        holder=f"run {ticket}",
        pid=1,
        priority=priority,
        due_s=due_s(asked_s, priority),
        request=request,
        devices=devices,
        grant=grant,
        since=datetime.now(UTC),
    )


def test_waiting_for_the_ageing_time_weighs_as_much_as_a_level_of_priority() -> None:
    devices = host(cores=1)
    patient = claim(1, LeaseRequest(cores=1), devices, asked_s=0, priority=4)
    urgent = claim(2, LeaseRequest(cores=1), devices, asked_s=3 * AGEING_S + 1, priority=1)
    assert "1" in grants_for([patient, urgent], Taken())
    assert "2" not in grants_for([patient, urgent], Taken())


SHARED = CoreSet(node=0, physical=((0, 4), (1, 5), (2, 6)))


@pytest.mark.parametrize(
    ("request_", "devices", "taken", "cores", "gpus"),
    [
        pytest.param(
            LeaseRequest(cores=3, gpus=1), host(cores=8, gpus=2, nodes=2),
            Taken(gpus={"GPU-0"}), (4, 5, 6), ("GPU-1",),
            id="cores of the memory node of the GPU",
        ),
        pytest.param(
            LeaseRequest(cores=2), host(cores=8, nodes=2), Taken(cores={4, 5}), (6, 7), (),
            id="the node with the least room that will do",
        ),
        pytest.param(
            LeaseRequest(cores=5), host(cores=8, nodes=2), Taken(), (0, 1, 2, 3, 4), (),
            id="two nodes only where one is too small",
        ),
        pytest.param(
            LeaseRequest(cores=6), host(cores=12, nodes=3), Taken(cores={4, 8, 9}),
            (0, 1, 2, 3, 10, 11), (), id="after the largest node the tightest that has the rest",
        ),
        pytest.param(
            LeaseRequest(cores=2), HostDevices(core_sets=(SHARED,)), Taken(cores={0}), (1, 5), (),
            id="whole physical cores first",
        ),
    ],
)  # fmt: skip
def test_a_place_is_chosen_near_and_tight(
    request_: LeaseRequest,
    devices: HostDevices,
    taken: Taken,
    cores: tuple[int, ...],
    gpus: tuple[str, ...],
) -> None:
    assert place(request_, devices, taken) == Grant(cores=cores, gpus=gpus)


def test_slices_are_given_by_profile_and_whole_gpus_never_for_slices() -> None:
    devices = HostDevices(
        core_sets=(),
        gpus=(
            gpu("GPU-0"),
            gpu("MIG-1", mig_profile="1g.18gb"),
            gpu("MIG-2", mig_profile="2g.35gb"),
        ),
    )
    sliced = place(LeaseRequest(gpus=1, mig_profile="2g.35gb"), devices, Taken())
    whole = place(LeaseRequest(gpus=1), devices, Taken())
    assert (sliced.gpus, whole.gpus) == (("MIG-2",), ("GPU-0",))
    assert place(LeaseRequest(gpus=2), devices, Taken()) is None


def test_a_container_keeps_no_more_cores_busy_than_it_may() -> None:
    limited = host(cores=8, limit=CoreLimit(num_cores=2, group="/container"))
    assert place(LeaseRequest(cores=3), limited, Taken()) is None
    held = claim(1, LeaseRequest(cores=2), limited, grant=Grant(cores=(0, 1)))
    taken = Taken.by([held])
    assert place(LeaseRequest(cores=1), limited, taken) is None
    assert place(LeaseRequest(cores=1), host(cores=8), taken) is not None, "others are not limited"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "ask for nothing"),
        ({"cores": 1, "mig_profile": "1g.18gb"}, "set gpus"),
        ({"gpus": 2, "mig_profile": "1g.18gb"}, "one slice at a time"),
        ({"gpus": 1, "mig_profile": "big"}, "pattern"),
        ({"cores": -1}, "greater than or equal"),
    ],
)
def test_a_wrong_request_is_rejected(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        LeaseRequest.model_validate(wrong)


def of(tenant: str, cores: int | None = None, gpus: int | None = None) -> HostDevices:
    limits = {"tenant": tenant, "tenant_cores": cores, "tenant_gpus": gpus}
    return host(cores=8, gpus=2).model_copy(update=limits)


def test_a_tenant_at_its_limit_waits_and_keeps_nothing_from_others() -> None:
    red, blue, large = of("red", cores=4), of("blue"), LeaseRequest(cores=3)
    held = claim(1, large, red, grant=Grant(cores=(0, 1, 2)))
    line = [claim(2, large, red), claim(3, LeaseRequest(cores=1), red)]
    line.append(claim(4, LeaseRequest(cores=5), blue))
    assert grants_for(line, Taken.by([held])) == {"4": Grant(cores=(3, 4, 5, 6, 7))}
    one, none = LeaseRequest(gpus=1), of("red", gpus=0)
    assert place(one, none, Taken()) is None
    assert place(one, blue, Taken(gpus={"GPU-0"})) == Grant(gpus=("GPU-1",))


def test_what_another_tenant_runs_is_not_said(tmp_path: Path) -> None:
    repository, whole = LeaseRepository(tmp_path), LeaseRequest(cores=8)
    with acquire(repository, whole, "secret", devices=of("red")):
        for other, seen in (("blue", "tenant red"), ("", "tenant red"), ("red", "secret")):
            with pytest.raises(LeaseError, match=f"held by {seen}"):
                acquire(repository, whole, "mine", wait_s=0, devices=of(other))
    with pytest.raises(ConfigurationError, match="cannot be leased here"):
        acquire(repository, whole, "x", devices=of("red", cores=4))
