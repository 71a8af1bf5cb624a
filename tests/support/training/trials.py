"""Searches without a network: what a trial learns is a formula of its point."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.contracts.base import Artifact
from tasks.contracts.training import EpochMetrics, StudyRecord, TrainedModel
from tasks.training.config import TrainingConfig
from tasks.training.search.config import SearchConfig
from tasks.training.search.storage import StudyStorage
from tasks.training.search.study import Proposal, Study
from tasks.training.search.trial import Driver, Launch, TrialOrder, run_trial
from tests.support.data.builders import epoch, trained_model

BASE = TrainingConfig(max_epochs=8)
SPACE: dict[str, Any] = {
    "learning_rate": {"kind": "float", "low": 1e-4, "high": 1e-1, "log": True},
    "dropout": {"kind": "float", "low": 0.0, "high": 0.6},
    "num_bins": {"kind": "int", "low": 4, "high": 16, "step": 4},
    "hidden_sizes": {"kind": "choices", "values": [[32], [64, 32]]},
}


def search(**changes: Any) -> SearchConfig:
    return SearchConfig.model_validate({"space": SPACE, **changes})


def auc_of(config: TrainingConfig, epoch: int) -> float:
    """Best where the rate is near 0.01 and the dropout near 0.2; rises with the epochs."""
    distance = abs(math.log10(config.learning_rate) + 2) + 2 * abs(config.dropout - 0.2)
    return 0.8 - 0.08 * distance - 0.1 / (epoch + 1)


@dataclass
class Trainer:
    """Trains in place of the launcher; `stumble` may raise at any epoch."""

    stumble: Callable[[TrainingConfig, int], None] = lambda config, epoch: None
    trained: list[TrainingConfig] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)

    def __call__(
        self, config: TrainingConfig, work: Path, report: Callable[[EpochMetrics], None]
    ) -> TrainedModel:
        self.trained.append(config)
        self.folders.append(work)
        work.mkdir(parents=True, exist_ok=True)
        done = tuple(epoch(e, auc_of(config, e)) for e in range(config.max_epochs))
        for each in done:
            self.stumble(config, each.epoch)
            report(each)
        return trained_model(
            Artifact(uri="artifact:models/0/x", sha256="0" * 64, num_bytes=0),
            config=config.model_dump(mode="json"),
            epochs=done,
            best_epoch=len(done) - 1,
            seconds=float(len(done)),
        )


def open_study(folder: Path, config: SearchConfig, storage: StudyStorage | None = None) -> Study:
    where = storage or StudyStorage.of("", folder / "search", {})
    return Study("small-1", where, config, BASE.max_epochs)


def run_search(
    folder: Path, config: SearchConfig, launch: Launch, storage: StudyStorage | None = None
) -> StudyRecord:
    """Drive a study to its end, everything under `folder`."""
    study = open_study(folder, config, storage=storage)

    def run(proposal: Proposal) -> None:
        order = TrialOrder.of(study.name, proposal, BASE, config)
        # A thread reaches the database on its own; one after the other they may share the study.
        own = open_study(folder, config, storage=storage) if config.parallel_trials > 1 else study
        run_trial(order, own, folder / "work", launch)

    return study.record("test", Driver(study, config, run, lambda _: None).drive())
