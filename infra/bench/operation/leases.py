"""What a lease without a rival costs: two files locked, one written and removed."""

import statistics

from infra.bench.figures import Measured, at_most, seconds
from infra.bench.parts import Bench
from tasks.control.config import LeaseRequest
from tasks.control.leases.devices import CoreSet, HostDevices
from tasks.control.leases.repository import LeaseRepository, acquire


def figures(bench: Bench) -> Measured:
    """The figure for a lease that nobody else wants."""
    rounds = bench.size(60, 3)
    cores = CoreSet(node=0, physical=tuple((core,) for core in range(64)))
    devices = HostDevices(core_sets=(cores,))
    leases = LeaseRepository(bench.folder)

    def lease() -> None:
        acquire(leases, LeaseRequest(cores=1), "bench", devices=devices).release()

    taken_ms = 1e3 * statistics.median(seconds(lease) for _ in range(rounds))
    evidence = f"acquire and release, median of {rounds}"
    return [at_most("a lease, ms", taken_ms, 10.0, evidence)]
