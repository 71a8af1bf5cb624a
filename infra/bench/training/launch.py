"""From the start of the training task to the first optimizer step, beyond importing PyTorch.

Each round takes, in turn, new processes that import PyTorch, that start two ranks anew, and that
fork them. The driver has imported what a task finds imported, and nothing of the training room. The
best of each is compared: whatever else the machine does can only add to it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from infra.bench.figures import Measured, at_most
from infra.bench.parts import Bench
from tasks.kernel.settings import PROJECT_ROOT

ROUNDS = 5
LIMIT_S = 300
RANK_MODULE = "infra.bench.training.launch_rank"
NUM_ROWS = 4000
BOUND_S = 3.0


@dataclass(frozen=True)
class Times:
    """Seconds, the best of all rounds."""

    importing: float
    started: float
    forked: float


def figures(bench: Bench) -> Measured:
    """The figure for forked ranks, which are the default, and for ranks that are started."""
    rounds = bench.size(ROUNDS, 1)
    best = measure(rounds, bench.folder)
    evidence = f"importing PyTorch takes {best.importing:.2f} s, best of {rounds}"
    return [
        at_most(
            f"first step, {how} ranks, s beyond importing",
            seconds - best.importing,
            BOUND_S,
            f"{seconds:.2f} s ({seconds / best.importing:.1f} imports); {evidence}",
        )
        for how, seconds in (("forked", best.forked), ("started", best.started))
    ]


def measure(rounds: int, scratch: Path) -> Times:
    """Take all rounds."""
    importing: list[float] = []
    started: list[float] = []
    forked: list[float] = []
    for number in range(rounds):
        importing.append(_seconds_of("-c", "import torch"))
        for how, times in (("start", started), ("fork", forked)):
            folder = scratch / f"{how}-{number}"
            _seconds_of("-m", "infra.bench.training.launch", how, str(folder))
            times.append(float((folder / "seconds").read_text()))
    return Times(min(importing), min(started), min(forked))


def _seconds_of(*arguments: str) -> float:
    begun = time.monotonic()
    subprocess.run([sys.executable, *arguments], cwd=PROJECT_ROOT, check=True, timeout=LIMIT_S)
    return time.monotonic() - begun


def drive(how: str, folder: Path) -> None:
    """Be the task: do what `launch_training` does, up to the end of one epoch."""
    from infra.bench.training.click_rows import click_rows, click_splits
    from tasks.kernel.settings import ArtifactStore

    store = ArtifactStore(folder / "store")
    rows, splits = click_rows(store, NUM_ROWS), click_splits()
    begun = time.monotonic()

    from contextlib import nullcontext

    from tasks.training.config import TrainingConfig
    from tasks.training.core.run_directory import RunDirectory, TrainingJob, exclusive
    from tasks.training.launch.config import LaunchConfig
    from tasks.training.launch.fork_server import ForkServer
    from tasks.training.launch.launcher import run_job

    launch = LaunchConfig(ranks=2, threads_per_rank=1, fork_ranks=how == "fork")
    config = TrainingConfig(launch=launch, max_epochs=1)
    run = RunDirectory(folder / "run")
    snapshot = rows.snapshot
    modules = [RANK_MODULE]
    with exclusive(run.path, 0) as lock:
        with ForkServer(modules, folder) if launch.fork_ranks else nullcontext() as fork_server:
            path = store.path(snapshot.data)
            job = TrainingJob(
                snapshot_path=path,
                columns=snapshot.columns,
                splits=splits,
                config=config,
                num_ranks=2,
                threads_per_rank=1,
            )
            run_job(run, job, lock, lambda _: None, RANK_MODULE, fork_server)
    first_step = float((run.path / "first-step").read_text())
    (folder / "seconds").write_text(str(first_step - begun))


if __name__ == "__main__":
    drive(sys.argv[1], Path(sys.argv[2]))
