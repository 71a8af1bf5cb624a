"""What a lease without a rival costs: two files locked, one written and removed."""

import statistics

from infra.bench.figures import Measured, at_most, seconds
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
    leases = LeaseRepository(bench.folder)

    def lease() -> None:
        acquire(leases, ONE_CORE, "bench", devices=devices).release()

    taken_ms = 1e3 * statistics.median(seconds(lease) for _ in range(rounds))
    evidence = f"acquire and release, median of {rounds}"
    return [at_most("a lease, ms", taken_ms, BOUND_MS, evidence)]
