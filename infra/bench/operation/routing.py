"""What it costs to run a stage as a flow, here and on a work pool.

A stage that does nothing is called as plain Python, as a flow in this process, and through its
deployment on a process worker, all against one real server. The process on the pool imports all
that the stages of the loop import, so its start costs what theirs costs. The median is kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from infra.bench.figures import Measured, at_most
from infra.bench.operation.prefect_api import prefect_api_server
from infra.bench.parts import Bench
from tasks.kernel.settings import PROJECT_ROOT

ROUNDS = 5
LIMIT_S = 900
POOL = "bench"
ROUTED_BOUND_S = 8.0
EMBEDDED_BOUND_S = 1.0


def figures(bench: Bench) -> Measured:
    """Seconds that a stage takes more on a work pool, and in process, than the plain function."""
    rounds = bench.size(ROUNDS, 1)
    taken = measure(bench.folder, rounds)
    plain, here, pool = (median(taken[way]) for way in ("plain", "here", "pool"))
    spread = f"{min(taken['pool']):.1f} to {max(taken['pool']):.1f} s in {rounds} rounds"
    return [
        at_most("stage in process over plain Python, s", here - plain, EMBEDDED_BOUND_S, ""),
        at_most("stage on a work pool over in process, s", pool - here, ROUTED_BOUND_S, spread),
    ]


def measure(home: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by `plain`, `here` and `pool`."""
    with (
        prefect_api_server(home / "prefect") as api,
        api.worker(POOL, FALAJ_HOME=str(home), PREFECT_WORKER_QUERY_SECONDS="2"),
    ):
        said = subprocess.run(
            [sys.executable, "-m", "infra.bench.operation.routing_loop", POOL, str(rounds)],
            env=api.command_environment(FALAJ_HOME=str(home)),
            cwd=PROJECT_ROOT,
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=True,
        ).stdout
    taken: dict[str, list[float]] = json.loads(said.splitlines()[-1])
    return taken
