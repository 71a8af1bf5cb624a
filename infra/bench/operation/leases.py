"""What a lease without a rival costs: two files locked, one written and removed."""

from __future__ import annotations

import statistics
import time

from infra.bench.figures import Measured, at_most
from infra.bench.parts import Bench
from tasks.control.config import LeaseRequest
from tasks.control.leases.devices import CoreSet, HostDevices
from tasks.control.leases.repository import LeaseRepository, acquire

ROUNDS = 60
BOUND_MS = 10.0
NUM_CORES = 64
ONE_CORE = LeaseRequest(cores=1)


def figures(bench: Bench) -> Measured:
    """The figure for a lease that nobody else wants."""
    rounds = bench.size(ROUNDS, 3)
    devices = HostDevices(
        core_sets=(CoreSet(node=0, physical=tuple((core,) for core in range(NUM_CORES))),)
    )
    leases, taken_ms = LeaseRepository(bench.folder), []
    for _ in range(rounds):
        begun = time.perf_counter()
        acquire(leases, ONE_CORE, "bench", devices=devices).release()
        taken_ms.append(1e3 * (time.perf_counter() - begun))
    evidence = f"acquire and release, median of {rounds}"
    return [at_most("a lease, ms", statistics.median(taken_ms), BOUND_MS, evidence)]
