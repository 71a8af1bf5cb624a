"""One trial: train a point of the space, report its epochs, and end it early where that pays."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt

from tasks.contracts.base import Contract
from tasks.contracts.data import DataSplits, ValidatedDataset
from tasks.contracts.training import EpochMetrics, TrainedModel
from tasks.kernel.errors import TrainingError, refused_writes_explained
from tasks.kernel.settings import code_digest, content_key
from tasks.training.config import ONLY_MEASURES, TrainingConfig
from tasks.training.search.config import SearchConfig
from tasks.training.search.space import configured
from tasks.training.search.study import Proposal, Study

LOGGER = logging.getLogger(__name__)

Launch = Callable[[TrainingConfig, Path, Callable[[EpochMetrics], None]], TrainedModel]
"""Trains a configuration in a folder of run directories, calling back after each epoch."""


class TrialOrder(Contract):
    """What a trial is asked to do; small, so that it can be sent to a work pool."""

    study: str
    number: NonNegativeInt
    attempt: PositiveInt = 1
    point: dict[str, float | int | str]
    base: TrainingConfig
    search: SearchConfig

    @classmethod
    def of(
        cls, study: str, proposal: Proposal, base: TrainingConfig, search: SearchConfig
    ) -> TrialOrder:
        """The order for a proposal."""
        return cls(
            study=study,
            number=proposal.number,
            attempt=proposal.attempt,
            point=dict(proposal.point),
            base=base,
            search=search,
        )

    @property
    def key(self) -> str:
        """Names this attempt: ordered twice, it is run once."""
        return f"{self.study}:{self.number}:{self.attempt}"


class PrunedTrial(Exception):  # noqa: N818  (it is no error)
    """Leaves a training that is not worth going on; no error, so it is none of our errors."""


def study_name(
    dataset: ValidatedDataset, splits: DataSplits, base: TrainingConfig, config: SearchConfig
) -> str:
    """Name of the study of these data, this space and this code."""
    snapshot = dataset.snapshot
    key = content_key(
        snapshot.data.sha256,
        snapshot.columns,
        splits,
        base.computation(),
        config.identity(),
        code_digest(__file__, "tasks.training.launch.launcher", without=ONLY_MEASURES),
    )
    return f"search-{key[:12]}"


def run_trial(order: TrialOrder, study: Study, work: Path, launch: Launch) -> None:
    """Run a trial to its end and keep the outcome in the study.

    A trial whose outcome is kept already is not run again. One that was cut off resumes from its
    newest checkpoint, in a folder of its own.

    Args:
        order: what to do.
        study: where to report to.
        work: folder of the trials' run directories.
        launch: trains.

    Raises:
        FalajError: what stops a training without saying anything about its point; the trial stays
            begun and is taken up again by the next run.
    """
    if study.is_finished(order.number):
        return
    started = time.monotonic()
    epochs: list[EpochMetrics] = []

    def report(epoch: EpochMetrics) -> None:
        epochs.append(epoch)
        if study.report(order.number, epoch):
            raise PrunedTrial

    folder = work / order.study / f"trial-{order.number}"
    try:
        model = launch(configured(order.base, order.point), folder, report)
    except PrunedTrial:
        spent_s = _spent(epochs, started)
        study.end(order.number, "PRUNED", epochs, spent_s, _why(order, epochs))
    except TrainingError as exc:
        LOGGER.warning("trial %d failed: %s", order.number, exc)
        study.end(order.number, "FAIL", epochs, _spent(epochs, started), str(exc))
    else:
        # A model that was in the store already cost nothing now.
        seconds = model.seconds if epochs else 0.0
        study.end(order.number, "COMPLETE", model.epochs, seconds)
    with refused_writes_explained(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _spent(epochs: list[EpochMetrics], started: float) -> float:
    """Seconds of this attempt, or of all reported epochs where earlier attempts did some."""
    return max(time.monotonic() - started, sum(epoch.seconds for epoch in epochs))


def _why(order: TrialOrder, epochs: list[EpochMetrics]) -> str:
    best = max(epoch.quality for epoch in epochs)
    return (
        f"rule {order.search.pruner} after epoch {epochs[-1].epoch + 1} of "
        f"{order.base.max_epochs}: best validation {epochs[-1].quality_name} so far {best:.4f}"
    )
