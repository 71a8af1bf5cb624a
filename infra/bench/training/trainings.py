"""Trainings on the data of a finished loop; all that they write is in the bench's folder."""

import shutil
from typing import Any

from infra.bench.parts import Bench, newest_record
from tasks.contracts.training import TrainedModel
from tasks.kernel.settings import ArtifactStore
from tasks.training.config import TrainingConfig
from tasks.training.core.run_directory import TrainingRequest
from tasks.training.launch.launcher import launch_training
from tasks.training.launch.monitor import OnEpoch


class Trainings:
    """The finished loop's dataset and model, in a store of the bench's own."""

    def __init__(self, bench: Bench) -> None:
        record = newest_record(bench.settings)
        self.model, self.dataset = record.model, record.dataset
        self.splits = record.model.splits
        self.store = ArtifactStore(bench.folder / "store")
        self._work = bench.folder / "training"
        source, snapshot = bench.settings.store, self.dataset.snapshot
        for artifact in (self.model.program, self.model.checkpoint, snapshot.data):
            path = source.path(artifact)
            copied = self.store.root / path.relative_to(source.root)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)

    def train(
        self, config: TrainingConfig, on_epoch: OnEpoch | None = None, **more: Any
    ) -> TrainedModel:
        """Train as the task does; what is not asked for otherwise is the loop's."""
        asked: dict[str, Any] = {"dataset": self.dataset, "splits": self.splits, **more}
        request = TrainingRequest(config=config, **asked)
        return launch_training(request, self.store, self._work, on_epoch)


def two_ranks(config: TrainingConfig) -> TrainingConfig:
    """The same on two ranks of one thread."""
    launch = config.launch.model_copy(update={"ranks": 2, "threads_per_rank": 1})
    return config.model_copy(update={"launch": launch})
