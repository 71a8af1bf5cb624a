"""Driving a study: so many trials at a time, until enough are done or time or budget is spent."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tasks.contracts.training import TrialRecord
from tasks.kernel.errors import TrainingError, TransientError
from tasks.training.search.config import SearchConfig
from tasks.training.search.study import Proposal, Study

LOGGER = logging.getLogger(__name__)
Run = Callable[[Proposal], None]
OnTrial = Callable[[TrialRecord], None]


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
    on_trial: OnTrial
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
        for proposal in again:
            LOGGER.info("trial %d was cut off and is taken up again", proposal.number)
        num_running, reason = 0, ""
        while True:
            while num_running < self.config.parallel_trials and self._failure is None:
                if again:
                    self._start(again.pop(0))
                elif (reason := self._why_stop()) or not self._start_next():
                    break
                num_running += 1
            if not num_running:
                break
            lost = self._wait_for_one()
            num_running -= 1
            again += [lost] if lost else []
        if self._failure is not None:
            raise self._failure
        return reason or f"num_trials={self.config.num_trials} trials are done"

    def _start_next(self) -> bool:
        proposal = self.study.propose()
        if proposal is not None:
            self._start(proposal)
        return proposal is not None

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
