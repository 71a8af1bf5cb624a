"""Small training runs on real ranks, shared by the tests of this folder."""

import re
import sys
from pathlib import Path
from typing import Any

from tasks.contracts.data import DataSplits
from tasks.contracts.training import EpochMetrics, StartingPoint, TrainedModel
from tasks.kernel.settings import ArtifactStore
from tasks.training.config import LaunchConfig, TrainingConfig
from tasks.training.core.run_directory import RunDirectory, RunResult, TrainingRequest, exclusive
from tasks.training.launch.launcher import WORKER_MODULE, OnEpoch, launch_training, run_job
from tests.support.data.builders import dataset, frame, splits, version_ref
from tests.support.host.processes import pids_whose_command_holds
from tests.support.training.reading_ranks import training_job

NUM_ROWS = 1600
CONFIG = TrainingConfig(
    launch=LaunchConfig(ranks=2, threads_per_rank=1),
    num_shards=4,
    global_batch_size=16,
    max_epochs=6,
    patience=6,
    hidden_sizes=(16, 8),
    dropout=0.0,
    category_dropout=0.0,
    num_bins=4,
    min_category_rows=5,
)


def config(**changes: object) -> TrainingConfig:
    """The small configuration with some fields changed."""
    return TrainingConfig.model_validate({**CONFIG.model_dump(), **changes})


def on_ranks(num_ranks: int) -> dict[str, object]:
    """Changes for `config`: that many ranks of one thread."""
    return {"launch": {**CONFIG.launch.model_dump(), "ranks": num_ranks}}


def train(
    folder: Path,
    settings: TrainingConfig = CONFIG,
    on_epoch: OnEpoch | None = None,
    windows: DataSplits | None = None,
    **learnt_from: Any,
) -> TrainedModel:
    """Train on the small snapshot, everything under `folder`."""
    store, windows = ArtifactStore(folder / "store"), windows or splits()
    request = TrainingRequest(dataset(store, frame(NUM_ROWS)), windows, settings, **learnt_from)
    return launch_training(request, store, folder / "work", on_epoch)


def run_ranks(
    folder: Path, settings: TrainingConfig, snapshot: Path, module: str = WORKER_MODULE
) -> RunResult:
    """Run the ranks of one job alone, without publishing anything."""
    job = training_job(snapshot_path=snapshot, config=settings, num_ranks=settings.launch.ranks)
    with exclusive(folder / "run", 0) as lock:
        return run_job(RunDirectory(folder / "run"), job, lock, lambda _: None, module)


def losses(epochs: tuple[EpochMetrics, ...]) -> list[tuple[float, float, float]]:
    """What an epoch computed, without how long it took."""
    return [(e.train_loss, e.validation_loss, e.validation_auc) for e in epochs]


def say_epoch(metrics: EpochMetrics) -> None:
    """For the standard output of a driver."""
    sys.stdout.write(f"epoch {metrics.epoch}\n")
    sys.stdout.flush()


def start_of(model: TrainedModel) -> StartingPoint:
    return StartingPoint(
        version=version_ref(model.program.sha256, model.snapshot_sha256, version=1),
        checkpoint=model.checkpoint,
        columns=model.columns,
        trained_on=model.splits.train,
    )


def pid_of_rank(rank: int, folder: Path) -> int:
    for pid in pids_whose_command_holds(str(folder)):
        if Path(f"/proc/{pid}/comm").read_text().strip() == f"falaj-rank-{rank}":
            return pid
    raise AssertionError(f"no rank {rank} runs in {folder}")


def finished_epochs(log: str) -> list[int]:
    return [int(number) for number in re.findall(r"rank 0 \| DEBUG epoch (\d+): train", log)]


def assert_no_kept_epoch_is_repeated(log: str) -> None:
    """An epoch that ended is on disk or it is computed again; what is on disk is not repeated.

    Ranks whose driver was killed may write one more epoch before their guards stop them, and
    no driver is left to put its line into the log: the log may end before what was kept.
    """
    first, second = log.split("--- attempt at")[1:]
    kept = int(re.search(r"resumed after epoch (\d+) of an earlier attempt", second)[1])
    assert finished_epochs(first) == list(range(len(finished_epochs(first))))
    assert finished_epochs(second) == list(range(kept + 1, CONFIG.max_epochs))


def log_of(model: TrainedModel, folder: Path) -> str:
    return ArtifactStore(folder / "store").path(model.log).read_text()


if __name__ == "__main__":
    train(Path(sys.argv[1]), on_epoch=say_epoch)
