"""Leases under many kills, with a long line, and with their database away: minutes of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from tasks.control.leases.config import LeaseRequest
from tasks.control.leases.leases import acquire
from tasks.control.leases.placement import LeaseTerms
from tasks.control.leases.repository import LeaseRepository
from tasks.kernel.errors import LeaseLostError
from tests.support.host.processes import wait_until
from tests.support.platform.lease_devices import host
from tests.support.platform.lease_farm import farm, kill_at_random, lines_of
from tests.support.services.servers import postgres_server
from tests.support.suite.promises import Promise, proves

pytestmark = [pytest.mark.drill, pytest.mark.timeout(0)]

NUM_KILLS = 50
NUM_WAITING = 200


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[str]:
    with postgres_server(tmp_path) as uri:
        yield uri


@proves(Promise.INTERRUPT, "no device held by two, none leaked")
def test_fifty_random_kills_on_postgresql(tmp_path: Path, postgres: str) -> None:
    kill_at_random(tmp_path / "farm", postgres, NUM_KILLS)


@proves(Promise.INTERRUPT, "all are served, none is in the way")
def test_two_hundred_waiting_processes_are_all_served_and_idle_meanwhile(tmp_path: Path) -> None:
    url, folder = f"sqlite:///{tmp_path / 'operation.db'}", tmp_path / "farm"
    one_core = host(cores=1)
    options = {
        "num_workers": NUM_WAITING,
        "devices": one_core.model_dump(mode="json"),
        "requests": [{"cores": 1}],
        "terms": {},
        "hold_s": 0.01,
        "rounds": 1,
    }
    repository = LeaseRepository(url)
    with acquire(repository, LeaseRequest(cores=1), "holder", devices=one_core) as lease:
        with farm(folder, url, **options) as process:
            wait_until(lambda: len(repository.facts()) == NUM_WAITING + 1, "all in line", 600)
            workers = psutil.Process(process.pid).children()
            before = sum(sum(each.cpu_times()[:2]) for each in workers)
            time.sleep(30)
            spent = sum(sum(each.cpu_times()[:2]) for each in workers) - before
            sys.stdout.write(f"{NUM_WAITING} waiting: {spent / 30:.1%} of a core\n")
            lease.release()
            begun = time.monotonic()
            process.wait(600)
            sys.stdout.write(f"all served within {time.monotonic() - begun:.1f} s\n")
        assert len(lines_of(folder / "journal")) == NUM_WAITING
        assert not lines_of(folder / "violations")


@proves(Promise.INTERRUPT, "the lease outlives 10 s without a database")
def test_a_database_away_for_ten_seconds_costs_no_lease_and_one_away_for_longer_does(
    postgres: str,
) -> None:
    with psycopg.connect(postgres) as connection:
        server = connection.info.backend_pid
    parent = psutil.Process(server).ppid()
    with acquire(
        LeaseRepository(postgres, LeaseTerms(ttl_s=30)), LeaseRequest(cores=1), "a", devices=host()
    ) as lease:
        freeze(parent, 10)
        time.sleep(30)
        lease.check()
    repository = LeaseRepository(postgres, LeaseTerms(ttl_s=5))
    with acquire(repository, LeaseRequest(cores=1), "a", devices=host()) as lease:
        freeze(parent, 10)
        with pytest.raises(LeaseLostError, match="no heartbeat"):
            lease.check()


def freeze(postmaster: int, seconds: float) -> None:
    """Let a server and all its processes stand still for a while."""
    family = [psutil.Process(postmaster), *psutil.Process(postmaster).children()]
    for each in family:
        each.suspend()
    time.sleep(seconds)
    for each in family:
        each.resume()
