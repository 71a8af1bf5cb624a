"""Prefect tasks of the training room: a training, a trial, the plan of a smaller network."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast
from uuid import UUID

import httpx
from prefect import artifacts, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from tasks.contracts import training
from tasks.contracts.data import DataSplits, ValidatedDataset
from tasks.contracts.release import CompressionParent
from tasks.kernel.process import report_progress
from tasks.kernel.retry_policy import RETRIED, is_api_away, reused
from tasks.kernel.settings import Settings
from tasks.training.compression.config import CompressionConfig
from tasks.training.config import TrainingConfig
from tasks.training.core.run_directory import TrainingRequest
from tasks.training.search.trial import TrialOrder

if TYPE_CHECKING:
    from tasks.training.compression.plan import StudentPlan
    from tasks.training.launch.monitor import OnEpoch

LOGGER = logging.getLogger(__name__)
# Above the longest `time_limit_s`, which the driver keeps itself and which names what was reached.
TIMEOUT_S = 8 * 86400


class Progress:
    """A bar in the Prefect UI; a server that is away costs a step of it, never the training.

    Args:
        description: what it counts.
    """

    def __init__(self, description: str) -> None:
        made = artifacts.create_progress_artifact(
            progress=0.0, key="training-progress", description=description
        )
        self._artifact = cast(UUID, made)

    def show(self, percent: float) -> None:
        """Move the bar."""
        try:
            artifacts.update_progress_artifact(self._artifact, progress=percent)
        except httpx.HTTPError as exc:
            if not is_api_away(exc):
                raise
            LOGGER.warning("progress is not shown, the Prefect API is away: %s", exc)


@task(
    name="train-distributed",
    task_run_name="train-{dataset.snapshot.feature_service}-{config.strategy.name}",
    **reused(__file__, TIMEOUT_S),
)
def train_distributed(
    dataset: ValidatedDataset,
    splits: DataSplits,
    config: TrainingConfig,
    initial: training.StartingPoint | None = None,
    distillation: training.DistillationTargets | None = None,
) -> training.TrainedModel:
    """Train what `config.model` names, a network on ranks, and return the best epoch.

    Safe to retry: ranks resume from the newest complete checkpoint, and the model appears under a
    key of its content, complete or not at all.

    Raises:
        TransientError: a rank was lost, stuck, or another process trains the same. Retried.
        DataContractError: the snapshot is not what was promised. Not retried.
        ConfigurationError: the device that is asked for is not there. Not retried.
        TrainingError: training failed in a way that will repeat. Not retried.
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.training.models.making import make_model

    settings = Settings.from_environment()
    logger = get_run_logger()
    progress = Progress(f"Epochs of at most {config.max_epochs}; training may stop early.")

    def report(metrics: training.EpochMetrics) -> None:
        logger.info(
            "epoch %d: train loss %.4f, validation loss %.4f, validation %s %.4f, %.1f s",
            metrics.epoch,
            metrics.train_loss,
            metrics.validation_loss,
            metrics.quality_name,
            metrics.quality,
            metrics.seconds,
        )
        progress.show(min(100.0, 100 * (metrics.epoch + 1) / config.max_epochs))
        text = f"epoch {metrics.epoch + 1} of at most {config.max_epochs}"
        report_progress("epochs", metrics.epoch + 1, config.max_epochs, text)

    request = TrainingRequest(dataset, splits, config, initial, distillation, settings.feature_repo)
    model = make_model(request, settings.store, settings.home / "training", report)
    progress.show(100.0)
    report_progress("epochs", config.max_epochs, config.max_epochs, "all epochs")
    artifacts.create_table_artifact(
        key="training-epochs",
        table=[epoch.model_dump(mode="json") for epoch in model.epochs],
        description=f"Epoch {model.best_epoch} did best on the validation window and was kept. "
        f"{model.launch}.",
    )
    return model


@task(
    name="plan-student",
    task_run_name="plan-{config.method}-of-v{parent.program.version.version}",
    **reused(__file__, 600),
)
def plan_student(
    parent: CompressionParent, config: CompressionConfig, present: TrainingConfig
) -> "StudentPlan":
    """Decide what a smaller network is, and prune the parent where that is asked for.

    Safe to retry: the pruned weights appear whole, under a key of their content, or not at all.

    Raises:
        ConfigurationError: the network would be no smaller, or cannot be pruned. Not retried.
        ArtifactError: the parent's checkpoint is absent or damaged. Not retried.
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.training.compression import plan as planning

    plan = planning.plan_student(parent, config, present, Settings.from_environment().store)
    get_run_logger().info(
        "%s: hidden layers of %s units, the large network has %s",
        config.method,
        "-".join(map(str, plan.config.hidden_sizes)),
        "-".join(map(str, plan.compression.parent_sizes)),
    )
    return plan


# No timeout: a trial may run in a thread, where Prefect cannot keep one. The training's own driver
# keeps `time_limit_s`.
@task(
    name="run-trial",
    task_run_name="trial-{order.number}-of-{order.study}",
    **RETRIED,
    cache_policy=NO_CACHE,
)
def run_trial(
    order: TrialOrder, dataset: ValidatedDataset, splits: DataSplits
) -> training.TrialRecord:
    """Train one point of the search space and keep the outcome in the study.

    Not cached: the study records what was done, and a model is trained once whatever asks for it.
    Safe to retry: an outcome is kept once, and ranks resume from the newest complete checkpoint.

    Raises:
        TransientError: a rank was lost, or the study's database does not answer. Retried.
        FalajError: what says nothing about this point, such as a full disk. Not retried.
    """
    from tasks.training.models.making import make_model
    from tasks.training.search import trial
    from tasks.training.search.storage import StudyStorage
    from tasks.training.search.study import Study

    settings, logger = Settings.from_environment(), get_run_logger()
    storage = StudyStorage.of(order.search.storage, search_folder(settings), os.environ)
    study = Study(order.study, storage, order.search, order.base.judged_epochs)

    def launch(config: TrainingConfig, work: Path, report: "OnEpoch") -> training.TrainedModel:
        request = TrainingRequest(dataset, splits, config, project=settings.feature_repo)
        return make_model(request, settings.store, work, report)

    trial.run_trial(order, study, settings.home / "training" / "trials", launch)
    record = study.trial(order.number)
    logger.debug("trial %d: %s", record.number, record.state)
    return record


def search_folder(settings: Settings) -> Path:
    """Folder of the studies' database and locks."""
    return settings.home / "search"
