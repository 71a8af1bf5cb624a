"""Making the model that a training asks for: a network on ranks, boosted trees, or both."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.contracts.training import TrainedModel
from tasks.kernel.extras import require_horovod
from tasks.kernel.settings import ArtifactStore
from tasks.training.config import TrainingConfig
from tasks.training.core.run_directory import TrainingRequest
from tasks.training.models.config import AVERAGE, NETWORK, BoostingConfig
from tasks.training.models.source import check_source

if TYPE_CHECKING:
    from tasks.training.launch.monitor import OnEpoch


def check_model(config: TrainingConfig, project: Path | None) -> None:
    """Refuse, before any data is read, a model that cannot be trained here.

    Raises:
        ConfigurationError: a library of it is not installed, or nothing is found under its name.
    """
    if config.has_network and config.strategy.name == "horovod":
        require_horovod()
    if config.has_trees:
        from tasks.training.models.boosting import check_library

        check_library(config.boosting)
    if config.own_model is not None:
        check_source(config.own_model, project)


def make_model(
    request: TrainingRequest, store: ArtifactStore, work: Path, on_epoch: OnEpoch | None = None
) -> TrainedModel:
    """Train what `request.config.model` names, or find it trained.

    Args:
        request: what to train on, how, and what to begin with.
        store: where the snapshot is and the model goes.
        work: folder of the ranks' run directories.
        on_epoch: called in this thread after each epoch; of trees when all are grown.

    Raises:
        TransientError: a rank was lost or stuck, or another process trains the same.
        DataContractError, ConfigurationError, TrainingError, ArtifactError, StorageError: as
            `launch.launcher.launch_training` and `boosting.train_boosting`.
    """
    config, report = request.config, on_epoch or (lambda _: None)
    check_model(config, request.project)
    if not config.has_network:
        return _trees(request, store, report)
    from tasks.training.launch.launcher import launch_training  # with Horovod

    if config.model != AVERAGE:
        return launch_training(request, store, work, on_epoch)
    alone = {"model": NETWORK, "boosting": BoostingConfig()}
    of_network = dataclasses.replace(request, config=config.model_copy(update=alone))
    network = launch_training(of_network, store, work, on_epoch)

    from tasks.training.models.average import average_of

    both = average_of(request, network, _trees(request, store, lambda _: None), store)
    report(both.epochs[-1])
    return both


def _trees(request: TrainingRequest, store: ArtifactStore, report: OnEpoch) -> TrainedModel:
    from tasks.training.models.boosting import train_boosting  # with scikit-learn and PyTorch

    model = train_boosting(request, store)
    for epoch in model.epochs:
        report(epoch)
    return model
