"""One trial: train a point of the space, report its epochs, and end it early where that pays."""

from __future__ import annotations

import contextvars
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt

from tasks.contracts.base import Contract
from tasks.contracts.data import DataSplits, ValidatedDataset
from tasks.contracts.training import EpochMetrics, TrainedModel, TrialRecord
from tasks.kernel.errors import TrainingError, TransientError, refused_writes_explained
from tasks.kernel.settings import code_digest, content_key
from tasks.training.config import ONLY_MEASURES, TrainingConfig
from tasks.training.search.config import SearchConfig, configured
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
        return cls(study=study, **vars(proposal), base=base, search=search)

    @property
    def key(self) -> str:
        """Names this attempt: ordered twice, it is run once."""
        return f"{self.study}:{self.number}:{self.attempt}"


class PrunedTrial(Exception):  # noqa: N818  (it is no error)
    """Leaves a training that is not worth going on; no error, so it is none of our errors."""


def study_name(
    dataset: ValidatedDataset,
    splits: DataSplits,
    base: TrainingConfig,
    config: SearchConfig,
    own_code: str = "",
) -> str:
    """Name of the study of these data, this space and this code, that of the user's included."""
    snapshot = dataset.snapshot
    key = content_key(
        snapshot.data.sha256,
        snapshot.columns,
        splits,
        base.computation(),
        config.identity(),
        own_code,
        code_digest(__file__, "tasks.training.models.making", without=ONLY_MEASURES),
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
        study.end(order.number, "PRUNED", epochs, _spent(epochs, started), _why(order, epochs))
    except TrainingError as exc:
        LOGGER.warning("trial %d failed: %s", order.number, exc)
        study.end(order.number, "FAIL", epochs, _spent(epochs, started), str(exc))
    else:
        # A model that was in the store already cost nothing now.
        study.end(order.number, "COMPLETE", model.epochs, model.seconds if epochs else 0.0)
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


Run = Callable[[Proposal], None]


@dataclass
class Driver:
    """Runs the trials of one study.

    Trials run in daemon threads: where the search is interrupted, its process can end at once, and
    the guards of its ranks end with it. Trials that were begun are taken up by the next run.

    Args:
        study: asked for points.
        config: how many, how many at a time, how long.
        run: runs one trial to its end and keeps the outcome in the study.
        on_trial: called in this thread for each trial that ends.
    """

    study: Study
    config: SearchConfig
    run: Run
    on_trial: Callable[[TrialRecord], None]
    _ended: queue.SimpleQueue[tuple[Proposal, BaseException | None]] = field(
        default_factory=queue.SimpleQueue
    )
    _failure: BaseException | None = None

    def drive(self) -> str:
        """Run trials until there is a reason to stop; returns the reason.

        Raises:
            FalajError: what a trial met that says nothing about its point, such as a full disk. The
                others that run are waited for first.
        """
        again = self.study.running()
        for lost in again:
            LOGGER.info("trial %d was cut off and is taken up again", lost.number)
        num_running, reason = 0, ""
        while True:
            while num_running < self.config.parallel_trials and self._failure is None:
                if not again and (reason := self._why_stop()):
                    break
                proposal = again.pop(0) if again else self.study.propose()
                if proposal is None:
                    break
                self._start(proposal)
                num_running += 1
            if not num_running:
                break
            retry = self._wait_for_one()
            num_running -= 1
            again += [retry] if retry else []
        if self._failure is not None:
            raise self._failure
        return reason or f"num_trials={self.config.num_trials} trials are done"

    def _start(self, proposal: Proposal) -> None:
        LOGGER.info("trial %d starts: %s", proposal.number, proposal)

        def work() -> None:
            failure: BaseException | None = None
            try:
                self.run(proposal)
            except BaseException as exc:  # handed to the driving thread, which raises it
                failure = exc
            self._ended.put((proposal, failure))

        # What is around a run (Prefect's flow, for one) is around its thread too.
        context = contextvars.copy_context()
        name = f"trial-{proposal.number}"
        threading.Thread(target=context.run, args=(work,), name=name, daemon=True).start()

    def _wait_for_one(self) -> Proposal | None:
        """Wait until a trial ends; returns it where its process was lost and it is to be rerun."""
        proposal, failure = self._ended.get()
        if isinstance(failure, TransientError):
            LOGGER.warning("trial %d was lost: %s", proposal.number, failure)
            # What failed may be what comes after the outcome was kept, which the end makes up for.
            if not self.study.is_finished(proposal.number) and (
                retry := self.study.lose(proposal.number, str(failure))
            ):
                return retry
        elif failure is not None:
            self._failure = self._failure or failure
            return None
        self.on_trial(self.study.trial(proposal.number))
        return None

    def _why_stop(self) -> str:
        budget = self.config.budget_s
        spent = sum(trial.seconds for trial in self.study.trials())
        if budget is not None and spent >= budget:
            return f"the trials took {spent:.0f} s of training, budget_s={budget:g}"
        return ""


def check_any_succeeded(study: Study) -> None:
    """Refuse a study without a single model.

    Raises:
        TrainingError: no trial is complete; the error holds the first reason.
    """
    trials = study.trials()
    if not any(trial.state == "complete" for trial in trials):
        reasons = [trial.reason for trial in trials if trial.reason]
        raise TrainingError(
            f"study {study.name}: none of {len(trials)} trial(s) gave a model; the first one: "
            f"{reasons[0] if reasons else 'none was started'}. Widen the space, or raise budget_s"
        )
