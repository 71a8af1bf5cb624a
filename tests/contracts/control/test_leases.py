"""Leases between real processes."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tasks.control.config import LeaseRequest
from tasks.control.leases.repository import LeaseRepository, Outlook, acquire
from tasks.kernel.errors import ConfigurationError, LeaseError
from tests.support.host.processes import python
from tests.support.platform.lease_devices import host
from tests.support.platform.lease_farm import kill_at_random
from tests.support.suite.promises import Promise, proves

pytestmark = pytest.mark.timeout(600)

ONE_CORE = LeaseRequest(cores=1)


@pytest.fixture
def leases(tmp_path: Path) -> LeaseRepository:
    return LeaseRepository(tmp_path / "leases")


@pytest.mark.slow
@proves(Promise.INTERRUPT, "no device held by two, none leaked")
def test_fifty_random_kills_leak_nothing_and_hand_nothing_to_two(tmp_path: Path) -> None:
    kill_at_random(tmp_path / "farm", num_kills=50)


HOLDING = """
import os, pathlib, subprocess, sys
from tasks.control.config import LeaseRequest
from tasks.control.leases.repository import LEASE_VARIABLE, LeaseRepository, acquire
from tests.support.platform.lease_devices import host
leases = LeaseRepository(pathlib.Path(sys.argv[1]))
lease = acquire(leases, LeaseRequest(cores=1), "a", devices=host(1))
environment = {**os.environ, LEASE_VARIABLE: lease.lease_id}
child = subprocess.Popen(["sleep", "600"], env=environment, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_devices_of_a_killed_holder_are_free_when_nothing_that_it_started_runs(
    tmp_path: Path, leases: LeaseRepository
) -> None:
    holder = python("-c", HOLDING, str(tmp_path / "leases"), stdout=subprocess.PIPE)
    child = int(holder.stdout.readline())
    try:
        holder.wait(60)
        with pytest.raises(LeaseError, match="held by a"):
            acquire(leases, ONE_CORE, "b", devices=host(cores=1), wait_s=0.6)
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()
    with acquire(leases, ONE_CORE, "b", devices=host(cores=1), wait_s=60) as lease:
        assert lease.grant.cores == (0,)


def test_who_waits_knows_its_place_and_leaves_no_claim_behind(leases: LeaseRepository) -> None:
    seen, two = list[Outlook](), host(cores=2)
    with acquire(leases, LeaseRequest(cores=2), "holder", devices=two):
        with pytest.raises(LeaseError, match=r"core\(s\) 0,1\. Nothing was started"):
            acquire(leases, ONE_CORE, "b", devices=two, wait_s=0.5, on_wait=seen.append)
        assert [each.holder for each in leases.claims()] == ["holder"]
        assert seen[0].num_before == 0
        assert [each.holder for each in seen[0].holders] == ["holder"]
    assert leases.claims() == []


def test_what_a_host_does_not_have_is_rejected_at_once(leases: LeaseRepository) -> None:
    with pytest.raises(ConfigurationError, match="may use 4 core\\(s\\) and no GPU"):
        acquire(leases, LeaseRequest(gpus=1), "a", devices=host())


def test_a_held_claim_of_a_version_that_says_it_otherwise_is_left_alone(
    leases: LeaseRepository,
) -> None:
    with acquire(leases, LeaseRequest(cores=1), "newer", devices=host(cores=1)):
        [file] = leases.folder.glob("*.json")
        written = json.loads(file.read_text())
        assert written["ticket"] == 0, "earlier versions need it"
        file.write_text("{}")
        assert leases.claims() == []
        assert file.exists()
    file.write_text("{}")
    assert leases.claims() == []
    assert not file.exists(), "of a process that was killed while it wrote"
