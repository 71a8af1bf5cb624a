"""The replay of the traffic's years, from a loop of its own."""

from infra.bench.figures import LeftOut, Measured
from infra.bench.operation import replay
from infra.bench.parts import Bench
from infra.bench.running import traffic_loop


def figures(bench: Bench) -> Measured:
    """Those of a replay; none on little data."""
    if bench.small:
        return [LeftOut("replay of the traffic", "not on little data")]
    return replay.figures(bench, traffic_loop(bench.folder))
