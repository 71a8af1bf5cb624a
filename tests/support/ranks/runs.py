"""Small training runs on real ranks, shared by the tests of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

from tasks.contracts.training import EpochMetrics, TrainedModel
from tasks.settings import ArtifactStore
from tasks.training.config import TrainingConfig
from tasks.training.launch.config import LaunchConfig
from tasks.training.launcher import WORKER_MODULE, OnEpoch, launch_training, run_job
from tasks.training.run_directory import RunDirectory, RunResult, TrainingJob, exclusive
from tests.support.data.builders import dataset, frame, splits

NUM_ROWS = 1600
CONFIG = TrainingConfig(
    launch=LaunchConfig(ranks=2, threads_per_rank=1, fork_ranks=False),
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
    folder: Path, settings: TrainingConfig = CONFIG, on_epoch: OnEpoch | None = None
) -> TrainedModel:
    """Train on the small snapshot, everything under `folder`."""
    store = ArtifactStore(folder / "store")
    small = dataset(store, frame(NUM_ROWS))
    return launch_training(small, splits(), settings, store, folder / "work", on_epoch)


def run_ranks(
    folder: Path, settings: TrainingConfig, snapshot: Path, module: str = WORKER_MODULE
) -> RunResult:
    """Run the ranks of one job alone, without publishing anything."""
    small = dataset(ArtifactStore(folder / "store"), frame(NUM_ROWS))
    job = TrainingJob(
        snapshot_path=snapshot,
        columns=small.snapshot.columns,
        splits=splits(),
        config=settings,
        num_ranks=settings.launch.ranks,
    )
    with exclusive(folder / "run", 0) as lock:
        return run_job(RunDirectory(folder / "run"), job, lock, lambda _: None, module)


def losses(epochs: tuple[EpochMetrics, ...]) -> list[tuple[float, float, float]]:
    """What an epoch computed, without how long it took."""
    return [(e.train_loss, e.validation_loss, e.validation_auc) for e in epochs]


def main(folder: str) -> None:
    """Be a driver of its own: train under `folder` and say when an epoch is done."""

    def say(metrics: EpochMetrics) -> None:
        sys.stdout.write(f"epoch {metrics.epoch}\n")
        sys.stdout.flush()

    train(Path(folder), on_epoch=say)


if __name__ == "__main__":
    main(sys.argv[1])
