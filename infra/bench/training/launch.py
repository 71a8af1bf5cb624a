"""From the start of the training task to the end of a first, small epoch, beyond importing PyTorch.

Each round takes new processes that import PyTorch, and that train on two ranks. The driver has
imported what a task finds imported, and nothing of the training room. The best of each counts:
whatever else the machine does can only add to it.
"""

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from infra.bench.figures import Measured, at_most, seconds
from infra.bench.parts import Bench, newest_record
from infra.bench.processes import run_python
from tasks.contracts.data import DataSplits


def figures(bench: Bench) -> Measured:
    """The figure of ranks as they are started: forked from one process that has imported all."""
    rounds = bench.size(5, 1)
    importing: list[float] = []
    forked: list[float] = []
    for number in range(rounds):
        folder, log = bench.folder / str(number), bench.folder / "log.txt"
        importing.append(
            seconds(lambda: subprocess.run((sys.executable, "-c", "import torch"), check=True))
        )
        run_python(["-m", "infra.bench.training.launch", str(folder)], log)
        forked.append(float((folder / "seconds").read_text()))
    epoch_s, import_s = min(forked), min(importing)
    evidence = (
        f"{epoch_s:.2f} s ({epoch_s / import_s:.1f} imports); importing PyTorch takes "
        f"{import_s:.2f} s, best of {rounds}"
    )
    name = "first epoch, forked ranks, s beyond importing"
    return [at_most(name, epoch_s - import_s, 3.0, evidence)]


def drive(folder: Path) -> None:
    """Be the task: train on three days of the finished loop's rows."""
    bench = Bench(folder)
    dataset = newest_record(bench.settings).dataset
    day, start = timedelta(days=1), dataset.snapshot.window.start + timedelta(days=7)
    splits = DataSplits.between(start, start + 2 * day, start + 3 * day, start + 4 * day)
    begun = time.monotonic()

    from infra.bench.training.trainings import Trainings, two_ranks
    from tasks.training.config import TrainingConfig

    ends: list[float] = []
    config = two_ranks(TrainingConfig(max_epochs=1))
    Trainings(bench).train(config, lambda _: ends.append(time.monotonic()), splits=splits)
    (folder / "seconds").write_text(str(ends[0] - begun))


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
