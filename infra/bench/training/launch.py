"""From the start of the training task to the first optimizer step, beyond importing PyTorch.

Each round takes, in turn, new processes that import PyTorch, and that train on two ranks. The
driver has imported what a task finds imported, and nothing of the training room. The best of each
counts: whatever else the machine does can only add to it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from infra.bench.figures import Measured, at_most
from infra.bench.parts import Bench
from tasks.kernel.settings import PROJECT_ROOT

ROUNDS = 5
LIMIT_S = 300
RANK_MODULE = "infra.bench.training.launch_rank"
NUM_ROWS = 4000
BOUND_S = 3.0


def figures(bench: Bench) -> Measured:
    """The figure of ranks as they are started: forked from one process that has imported all."""
    rounds = bench.size(ROUNDS, 1)
    importing: list[float] = []
    forked: list[float] = []
    for number in range(rounds):
        importing.append(_seconds_of("-c", "import torch"))
        folder = bench.folder / str(number)
        _seconds_of("-m", "infra.bench.training.launch", str(folder))
        forked.append(float((folder / "seconds").read_text()))
    evidence = f"importing PyTorch takes {min(importing):.2f} s, best of {rounds}"
    return [
        at_most(
            "first step, forked ranks, s beyond importing",
            min(forked) - min(importing),
            BOUND_S,
            f"{min(forked):.2f} s ({min(forked) / min(importing):.1f} imports); {evidence}",
        )
    ]


def _seconds_of(*arguments: str) -> float:
    begun = time.monotonic()
    subprocess.run([sys.executable, *arguments], cwd=PROJECT_ROOT, check=True, timeout=LIMIT_S)
    return time.monotonic() - begun


def drive(folder: Path) -> None:
    """Be the task: do what `launch_training` does, up to the end of one epoch."""
    from infra.bench.training.click_rows import click_rows, click_splits
    from tasks.kernel.settings import ArtifactStore

    store = ArtifactStore(folder / "store")
    rows, splits = click_rows(store, NUM_ROWS), click_splits()
    begun = time.monotonic()

    from tasks.training.config import TrainingConfig
    from tasks.training.core.run_directory import RunDirectory, TrainingJob, exclusive
    from tasks.training.launch.config import LaunchConfig
    from tasks.training.launch.launcher import run_job

    run = RunDirectory(folder / "run")
    with exclusive(run.path, 0) as lock:
        job = TrainingJob(
            snapshot_path=store.path(rows.snapshot.data),
            columns=rows.snapshot.columns,
            splits=splits,
            config=TrainingConfig(launch=LaunchConfig(ranks=2, threads_per_rank=1), max_epochs=1),
            num_ranks=2,
            threads_per_rank=1,
        )
        run_job(run, job, lock, lambda _: None, RANK_MODULE)
    first_step = float((run.path / "first-step").read_text())
    (folder / "seconds").write_text(str(first_step - begun))


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
