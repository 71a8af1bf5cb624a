"""What it costs to run a stage as a flow, here and on a work pool.

    python -m infra.bench.routing [ROUNDS]

A stage that does nothing is called as plain Python, as a flow in this process, and through its
deployment on a process worker, all against one real server. The process on the pool imports all
that the stages of the loop import, so its start costs what theirs costs. The median is kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from flows.embedded import client_environment, free_port, prefect_server, wait_until_ready
from infra.bench.figures import Figure, at_most
from tasks.settings import PROJECT_ROOT
from tasks.training.launch import guard

ROUNDS = 5
LIMIT_S = 900
POOL = "bench"
ROUTED_BOUND_S = 8.0
EMBEDDED_BOUND_S = 1.0


def routing_figures(rounds: int = ROUNDS) -> list[Figure]:
    """Seconds that a stage takes more on a work pool, and in process, than the plain function."""
    taken = measure(rounds)
    plain, here, pool = (median(taken[way]) for way in ("plain", "here", "pool"))
    spread = f"{min(taken['pool']):.1f} to {max(taken['pool']):.1f} s in {rounds} rounds"
    return [
        at_most("stage in process over plain Python, s", here - plain, EMBEDDED_BOUND_S, ""),
        at_most("stage on a work pool over in process, s", pool - here, ROUTED_BOUND_S, spread),
    ]


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by `plain`, `here` and `pool`."""
    with tempfile.TemporaryDirectory(prefix="falaj-bench-routing-") as scratch:
        home, port = Path(scratch), free_port()
        environment = {**os.environ, **client_environment(home, port)}
        environment |= {"PYTHONPATH": str(PROJECT_ROOT), "FALAJ_HOME": str(home)}
        with prefect_server(home, port) as server:
            wait_until_ready(server, home, port)
            with _worker(home, environment):
                told = subprocess.run(
                    [sys.executable, "-m", "infra.bench.routing_loop", POOL, str(rounds)],
                    env=environment,
                    cwd=PROJECT_ROOT,
                    stdout=subprocess.PIPE,
                    text=True,
                    timeout=LIMIT_S,
                    check=True,
                ).stdout
    taken: dict[str, list[float]] = json.loads(told.splitlines()[-1])
    return taken


@contextmanager
def _worker(home: Path, environment: dict[str, str]) -> Iterator[None]:
    """A process worker on the pool, which it makes; it ends with the block."""
    worker = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process"]
    command = [sys.executable, "-S", guard.__file__, str(os.getpid()), "5", "--", *worker]
    with (
        (home / "worker.log").open("ab") as log,
        subprocess.Popen(
            [*command, "--pool", POOL],
            env={**environment, "PREFECT_WORKER_QUERY_SECONDS": "2"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        ) as process,
    ):
        try:
            yield
        finally:
            process.terminate()


if __name__ == "__main__":
    for figure in routing_figures(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS):
        print(figure.line())
