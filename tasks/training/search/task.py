"""Prefect task of a trial."""

from __future__ import annotations

import os
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.contracts.data import DataSplits, ValidatedDataset
from tasks.contracts.training import TrialRecord
from tasks.kernel.retry_policy import RETRIED
from tasks.kernel.settings import Settings
from tasks.training.search.trial import TrialOrder


# No timeout: a trial may run in a thread, where Prefect cannot keep one. The training's own driver
# keeps `time_limit_s`.
@task(
    name="run-trial",
    task_run_name="trial-{order.number}-of-{order.study}",
    **RETRIED,
    cache_policy=NO_CACHE,
)
def run_trial(order: TrialOrder, dataset: ValidatedDataset, splits: DataSplits) -> TrialRecord:
    """Train one point of the search space and keep the outcome in the study.

    Not cached: the study records what was done, and a model is trained once whatever asks for it.
    Safe to retry: an outcome is kept once, and ranks resume from the newest complete checkpoint.

    Raises:
        TransientError: a rank was lost, or the study's database does not answer. Retried.
        FalajError: what says nothing about this point, such as a full disk. Not retried.
    """
    from tasks.training.launch.launcher import launch_training
    from tasks.training.search import trial
    from tasks.training.search.storage import StudyStorage
    from tasks.training.search.study import Study

    settings, logger = Settings.from_environment(), get_run_logger()
    storage = StudyStorage.of(order.search.storage, search_folder(settings), os.environ)
    study = Study(order.study, storage, order.search, order.base.max_epochs)
    trial.run_trial(
        order,
        study,
        settings.home / "training" / "trials",
        lambda config, work, report: launch_training(
            dataset, splits, config, settings.store, work, report
        ),
    )
    record = study.trial(order.number)
    logger.debug("trial %d: %s", record.number, record.state)
    return record


def search_folder(settings: Settings) -> Path:
    """Folder of the studies' database and locks."""
    return settings.home / "search"
