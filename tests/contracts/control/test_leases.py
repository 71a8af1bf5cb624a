"""Leases between real processes, on real SQLite and real PostgreSQL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from tasks.control.leases.config import LeaseRequest
from tasks.control.leases.devices import HostDevices
from tasks.control.leases.leases import acquire
from tasks.control.leases.placement import LeaseTerms
from tasks.control.leases.repository import LEASE_VARIABLE, LeaseRepository, Outlook
from tasks.kernel.errors import ConfigurationError, LeaseError, LeaseLostError
from tasks.kernel.process import ProcessName
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.host.processes import wait_until
from tests.support.platform.lease_devices import host
from tests.support.platform.lease_farm import children_of, farm, kill_at_random, lines_of
from tests.support.suite.promises import Promise, proves

pytestmark = pytest.mark.timeout(600)

NUM_KILLS = 50
ONE_CORE = LeaseRequest(cores=1)


@pytest.mark.slow
@proves(Promise.INTERRUPT, "no device held by two, none leaked")
def test_fifty_random_kills_leak_nothing_and_hand_nothing_to_two(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'operation' / 'operation.db'}"
    kill_at_random(tmp_path / "farm", url, NUM_KILLS)


def test_a_killed_holder_frees_its_devices_long_before_they_expire(
    tmp_path: Path, url: str
) -> None:
    only_one = host(cores=1)
    options = {"devices": only_one.model_dump(mode="json"), "requests": [{"cores": 1}]}
    with farm(tmp_path / "farm", url, num_workers=1, hold_s=1e6, **options) as process:
        wait_until(lambda: lines_of(tmp_path / "farm" / "journal"), "the lease", 120)
        (tmp_path / "farm" / "stop").touch()
        os.kill(children_of(process.pid)[0], signal.SIGKILL)
        repository = LeaseRepository(url, LeaseTerms(ttl_s=86400))
        with acquire(repository, ONE_CORE, "next", devices=only_one, wait_s=60) as lease:
            assert lease.token == 2


def test_devices_stay_taken_while_something_started_under_the_lease_still_runs(
    tmp_path: Path, url: str
) -> None:
    only_one, repository = host(cores=1), LeaseRepository(url)
    program = (
        "import subprocess, sys, os; from tasks.control.leases.leases import acquire; "
        "from tasks.control.leases.repository import LeaseRepository; "
        "from tasks.control.leases.config import LeaseRequest; "
        "from tests.support.platform.lease_devices import host; "
        "leases = LeaseRepository(sys.argv[1]); "
        "lease = acquire(leases, LeaseRequest(cores=1), 'a', devices=host(1)); "
        f"environment = dict(os.environ, {LEASE_VARIABLE}=lease.lease_id); "
        "child = subprocess.Popen(['sleep', '600'], env=environment, stdout=-3); "
        "print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, url], cwd=PROJECT_ROOT, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        holder.wait(60)
        with pytest.raises(LeaseError, match="held by a"):
            acquire(repository, ONE_CORE, "b", devices=only_one, wait_s=0.6)
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()
    with acquire(repository, ONE_CORE, "b", devices=only_one, wait_s=60):
        pass


def test_a_silent_holder_is_notified_and_loses_its_devices_to_who_waits(url: str) -> None:
    only_one, notified = host(cores=1), threading.Event()
    repository = LeaseRepository(url, LeaseTerms(ttl_s=1.0, grace_s=0.5))
    other = LeaseRepository(url, LeaseTerms(ttl_s=60))
    lease = acquire(repository, ONE_CORE, "a", devices=only_one, on_lost=lambda _: notified.set())
    repository.renew = lambda ticket: lease._claim.deadline_s  # type: ignore[method-assign] # silent
    with acquire(other, ONE_CORE, "b", devices=only_one, wait_s=60) as taken:
        assert lease.lost.is_set(), "the holder is notified before the devices are given to another"
        assert notified.wait(10)
        assert taken.token > lease.token
        with pytest.raises(LeaseLostError, match="lost: no heartbeat could be given in time"):
            lease.check()
        lease.release()
        assert [each.holder for each in other.facts()] == ["b"], "a late release takes nothing"


def test_a_lease_whose_row_was_removed_is_lost_at_its_next_heartbeat(url: str) -> None:
    repository = LeaseRepository(url, LeaseTerms(ttl_s=1.0))
    with acquire(repository, ONE_CORE, "a", devices=host()) as lease:
        repository.give_back(lease._claim.ticket)
        assert lease.lost.wait(30)
        assert "given to others" in lease.why_lost


def test_who_waits_is_served_by_priority_then_age(url: str) -> None:
    repository, served, threads = LeaseRepository(url), list[str](), []
    wanted = [("late and urgent", 1), ("first", 3), ("second", 3), ("idle", 5)]

    def wait_for(name: str, priority: int) -> None:
        with acquire(repository, ONE_CORE, name, devices=host(cores=1), priority=priority):
            served.append(name)

    with acquire(repository, ONE_CORE, "holder", devices=host(cores=1)):
        for name, priority in [wanted[3], wanted[1], wanted[2], wanted[0]]:
            threads.append(threading.Thread(target=wait_for, args=(name, priority)))
            threads[-1].start()
            waiting = len(threads)
            wait_until(lambda: len(repository.facts()) == 1 + waiting, f"{name} in line")  # noqa: B023
        assert [each.holder for each in repository.facts()][1:] == [name for name, _ in wanted]
    for thread in threads:
        thread.join(60)
    assert served == [name for name, _ in wanted]


def test_who_waits_is_notified_its_place_and_leaves_no_claim_behind(url: str) -> None:
    repository, seen = LeaseRepository(url), list[Outlook]()
    with acquire(repository, LeaseRequest(cores=2), "holder", devices=host(cores=2)) as lease:
        with pytest.raises(LeaseError) as failure:
            acquire(
                repository, ONE_CORE, "b", devices=host(cores=2), wait_s=0.5, on_wait=seen.append
            )
        assert [each.holder for each in repository.facts()] == ["holder"]
        assert seen[0].num_before == 0
        assert [each.holder for each in seen[0].holders] == ["holder"]
        assert str(lease.grant) == "core(s) 0,1"
    assert "core(s) 0,1. Nothing was started" in str(failure.value)
    assert repository.facts() == []


def test_what_a_host_does_not_have_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigurationError, match="may use 4 core\\(s\\) and no GPU"):
        acquire(LeaseRepository(url), LeaseRequest(gpus=1), "a", devices=host())


class Machine:
    """A machine of its own on the same database: another name and another boot."""

    def __init__(self, url: str, name: str, terms: LeaseTerms = LeaseTerms()) -> None:  # noqa: B008
        me = ProcessName.of_this()
        self.now_s = 1000.0
        self.repository = LeaseRepository(
            url,
            terms,
            host=name,
            who=lambda: me.model_copy(update={"boot": f"boot-of-{name}"}),
            clock=lambda: self.now_s,
        )


def test_two_machines_on_one_database_have_cores_of_their_own(url: str) -> None:
    machines = [Machine(url, name).repository for name in ("north", "south")]
    claims = [
        repository.ask(LeaseRequest(cores=4), f"run on {repository.host}", host(cores=4), 3)
        for repository in machines
    ]
    assert [each.state for each in claims] == ["held", "held"]
    assert {each.host for each in machines[0].facts()} == {"north", "south"}
    machines[0].free_ended()
    assert len(machines[1].facts()) == 2, "what another machine holds is no matter of this one"


def test_the_gpu_of_a_machine_that_lost_power_is_free_after_silence_seen_by_oneself(
    url: str,
) -> None:
    terms = LeaseTerms(ttl_s=0.2, grace_s=0.1)
    one_gpu, request = host(gpus=1), LeaseRequest(gpus=1)
    before = Machine(url, "before the power cut", terms)
    before.repository.ask(request, "a", one_gpu, 3)
    after = Machine(url, "after it", terms)
    claim = after.repository.ask(request, "b", one_gpu, 3)
    assert claim.state == "waiting"
    time.sleep(0.5)  # it has expired by the database's clock
    assert not after.repository.outlook(claim).is_my_turn, (
        "but nobody has watched it for long enough"
    )
    after.now_s += 0.5
    assert after.repository.outlook(claim).is_my_turn
    after.repository.renew(claim.ticket)
    served = after.repository.serve(claim)
    assert served is not None
    assert served.state == "held"


@contextmanager
def shifted_clock(repository: LeaseRepository, url: str, seconds: float) -> Iterator[None]:
    """Let the database's own clock be wrong, for everybody who connects from now on."""
    if url.startswith("sqlite"):

        def shift(connection: Any, _: object) -> None:
            now = datetime.fromtimestamp(time.time() + seconds, UTC)
            shown = now.strftime("%Y-%m-%d %H:%M:%S.%f")
            connection.create_function("strftime", 2, lambda *_: shown)

        sa.event.listen(repository.engine, "connect", shift)
        yield
        sa.event.remove(repository.engine, "connect", shift)
        return
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA wrong")
        connection.execute(
            "CREATE FUNCTION wrong.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS "
            f"$$ SELECT pg_catalog.clock_timestamp() + interval '{seconds} s' $$"
        )
        name = connection.info.dbname
        connection.execute(f"ALTER DATABASE {name} SET search_path = wrong, public, pg_catalog")
        yield
        connection.execute(f"ALTER DATABASE {name} RESET search_path")
        connection.execute("DROP SCHEMA wrong CASCADE")


@proves(Promise.CLOCK_JUMP, "no device held by two, and free after")
@pytest.mark.parametrize("seconds", [86400.0, -86400.0])
def test_a_jump_of_the_databases_clock_hands_no_device_to_two(url: str, seconds: float) -> None:
    repository = LeaseRepository(url, LeaseTerms(ttl_s=8.0))
    with acquire(repository, ONE_CORE, "a", devices=host(cores=1)) as lease:
        with shifted_clock(repository, url, seconds):
            with pytest.raises(LeaseError):
                acquire(repository, ONE_CORE, "b", devices=host(cores=1), wait_s=1.5)
            assert repository.free_ended() == []
            lease.check()
            assert repository.renew(lease._claim.ticket) is not None
            moved_s = repository.facts()[0].expires.timestamp() - time.time()
            assert abs(moved_s - seconds) < 3600, "the clock was indeed wrong"
        with pytest.raises(LeaseError):
            acquire(repository, ONE_CORE, "b", devices=host(cores=1), wait_s=0.3)
        lease.check()
    with acquire(repository, ONE_CORE, "b", devices=host(cores=1), wait_s=60):
        pass


def test_hosts_own_devices_can_be_leased(url: str) -> None:
    found = HostDevices.of_this_process()
    with acquire(LeaseRepository(url), LeaseRequest(cores=found.num_cores), "all") as lease:
        assert set(lease.grant.cores) <= os.sched_getaffinity(0)
        assert len(lease.grant.cores) == found.num_cores
