"""What a lease costs, as a ratio to the least that a database can do.

A bare transaction opens a connection, writes one row and commits; a lease without a rival is two
transactions (take, give back) and two threads. Turns alternate, the median of each is compared, so
whatever else the machine does falls on both. With others in line, taking a lease reads them all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import sqlalchemy as sa

from infra.bench.figures import Measured, at_most
from infra.bench.parts import Bench
from tasks.control.leases.config import LeaseRequest
from tasks.control.leases.devices import CoreSet, HostDevices
from tasks.control.leases.leases import acquire
from tasks.control.leases.repository import LeaseRepository
from tasks.metadata.tables import lease_state

ROUNDS = 60
BOUND = 10.0
NUM_CORES = 64
ONE_CORE = LeaseRequest(cores=1)


def figures(bench: Bench) -> Measured:
    """The figure for a lease that nobody else wants, on SQLite."""
    rounds = bench.size(ROUNDS, 3)
    devices = HostDevices(
        core_sets=(CoreSet(node=0, physical=tuple((core,) for core in range(NUM_CORES))),)
    )
    repository = LeaseRepository(f"sqlite:///{bench.folder / 'operation.db'}")
    bare: list[float] = []
    leased: list[float] = []
    for _ in range(rounds):
        bare.append(_seconds(lambda: _transact(repository)))
        leased.append(
            _seconds(lambda: acquire(repository, ONE_CORE, "bench", devices=devices).release())
        )
    bare_s, lease_s = statistics.median(bare), statistics.median(leased)
    evidence = (
        f"acquire and release {1e3 * lease_s:.1f} ms, a bare transaction {1e3 * bare_s:.1f} ms, "
        f"medians of {rounds}"
    )
    return [at_most("lease, times a bare transaction", lease_s / bare_s, BOUND, evidence)]


def _transact(repository: LeaseRepository) -> None:
    with repository.engine.begin() as connection:
        connection.execute(sa.update(lease_state).values(version=lease_state.c.version + 1))


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
