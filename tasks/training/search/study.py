"""One study: asks for points, judges trials while they run, and keeps what became of them.

A trial's proposal is a function of the seed, its number and the trials before it, so a search that
was cut off and run again proposes what an unbroken one would have (one trial at a time).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from tasks.contracts.training import EpochMetrics, SearchedField, StudyRecord, TrialRecord
from tasks.kernel.settings import content_key
from tasks.training.search import config as space
from tasks.training.search.storage import StudyStorage, explained, load_optuna

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

LEAST_FOR_IMPORTANCE = 4
RANDOM_TRIALS = 5
"""First trials of `tpe`, which are drawn at random."""
WHOLE_TRIALS = 4
"""First trials that the median rule ends never: a median of fewer is noise."""
WARM_UP_EPOCHS = 2
"""Epochs that every trial gets."""
MAX_RETRIES = 2
"""Times that a trial is taken up again after its process or host was lost."""
EPOCHS, SECONDS, REASON, ATTEMPTS = "epochs", "seconds", "reason", "attempts"
FINISHED = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}


@dataclass(frozen=True)
class Proposal:
    """A trial that is to be run."""

    number: int
    point: space.Point
    attempt: int

    def __str__(self) -> str:
        return space.described(self.point)


class Study:
    """One open study.

    Args:
        name: of the study; made where there is none.
        storage: where it is kept.
        config: how it searches.
        max_epochs: most epochs of a trial.
    """

    def __init__(
        self, name: str, storage: StudyStorage, config: space.SearchConfig, max_epochs: int
    ) -> None:
        optuna = load_optuna()
        self.name = name
        self._storage = storage
        self._config = config
        self._max_epochs = max_epochs
        with explained(storage):
            self._study = optuna.create_study(
                study_name=name,
                storage=storage.open(),
                direction="maximize",
                load_if_exists=True,
                pruner=pruner_of(config),
            )

    def running(self) -> list[Proposal]:
        """Trials that were begun and not finished: of this search, or of one that was cut off."""
        begun = [trial for trial in self._trials() if trial.state.name == "RUNNING"]
        for trial in begun:
            if not self._is_drawn(trial):
                self.end(trial.number, "FAIL", reason="cut off before its point was drawn")
        return [self._proposal(trial) for trial in begun if self._is_drawn(trial)]

    def _is_drawn(self, trial: FrozenTrial) -> bool:
        """False where a search was cut off while it drew the trial's point."""
        return trial.params.keys() == self._config.space.keys()

    def propose(self) -> Proposal | None:
        """Begin the next trial; None where the study has all the trials that are asked for."""
        number = len(self._trials())
        if number >= self._config.num_trials:
            return None
        self._study.sampler = sampler_of(self._config, number)
        dimensions = self._config.space.items()
        with explained(self._storage):
            trial = self._study.ask({name: distribution_of(d) for name, d in dimensions})
        return self._proposal(self._frozen(trial.number))

    def report(self, number: int, epoch: EpochMetrics) -> bool:
        """Keep an epoch's quality; True where the trial is not worth going on.

        A trial that is taken up again reports its earlier epochs again: they are kept once. In its
        last epoch no trial is ended, since nothing would be saved.
        """
        step = epoch.epoch + 1
        with explained(self._storage):
            trial = self._open_trial(number)
            if step not in self._frozen(number).intermediate_values:
                trial.report(epoch.quality, step)
            return step < self._max_epochs and trial.should_prune()

    def end(
        self,
        number: int,
        state: Literal["COMPLETE", "PRUNED", "FAIL"],
        epochs: Sequence[EpochMetrics] = (),
        seconds: float = 0.0,
        reason: str = "",
    ) -> None:
        """Keep what became of a trial; the value of a complete one is its best quality."""
        from optuna.trial import TrialState

        value = None
        if state == "COMPLETE":
            value = max(epoch.quality for epoch in epochs)
            for epoch in epochs:
                self.report(number, epoch)
        with explained(self._storage):
            trial = self._open_trial(number)
            trial.set_user_attr(EPOCHS, [epoch.model_dump(mode="json") for epoch in epochs])
            trial.set_user_attr(SECONDS, seconds)
            trial.set_user_attr(REASON, reason)
            self._study.tell(number, value, TrialState[state], skip_if_finished=True)

    def lose(self, number: int, reason: str) -> Proposal | None:
        """Note that a trial's process was lost; the trial to be taken up, None where it gave up."""
        attempt = self._proposal(self._frozen(number)).attempt
        if attempt > MAX_RETRIES:
            self.end(number, "FAIL", reason=f"lost {attempt} times: {reason}")
            return None
        with explained(self._storage):
            self._open_trial(number).set_user_attr(ATTEMPTS, attempt + 1)
        return self._proposal(self._frozen(number))

    def is_finished(self, number: int) -> bool:
        """True where the trial's outcome is kept."""
        return self._frozen(number).state.is_finished()

    def trials(self) -> tuple[TrialRecord, ...]:
        """All finished trials, in the order in which they were begun."""
        finished = (trial for trial in self._trials() if trial.state.name in FINISHED)
        return tuple(self._record_of(trial) for trial in finished if self._is_drawn(trial))

    def trial(self, number: int) -> TrialRecord:
        """One finished trial."""
        return self._record_of(self._frozen(number))

    def record(self, use_case: str, ended_because: str) -> StudyRecord:
        """The study as it is now."""
        config, trials = self._config, self.trials()
        complete = [t for t in trials if t.state == "complete" and t.quality is not None]
        best = max(complete, key=lambda t: (cast(float, t.quality), -t.number), default=None)
        return StudyRecord(
            study=self.name,
            use_case=use_case,
            task="regression" if any(t.r2 is not None for t in trials) else "classification",
            fields=searched_fields(config),
            trials=trials,
            best=None if best is None else best.number,
            importance=self._importance(),
            sampler=config.sampler,
            pruner=config.pruner,
            storage=self._storage.kind,
            max_epochs=self._max_epochs,
            ended_because=ended_because,
        )

    def _importance(self) -> dict[str, float]:
        """Share of each field in the variance of the quality (Hutter et al., 2014)."""
        from optuna.importance import FanovaImportanceEvaluator, get_param_importances

        complete = [trial for trial in self._trials() if trial.state.name == "COMPLETE"]
        if len(complete) < LEAST_FOR_IMPORTANCE or len({t.value for t in complete}) < 2:
            return {}
        evaluator = FanovaImportanceEvaluator(seed=self._config.seed)
        with explained(self._storage):
            found = get_param_importances(self._study, evaluator=evaluator)
        return {name: float(share) for name, share in found.items()}

    def _proposal(self, trial: FrozenTrial) -> Proposal:
        point = {name: trial.params[name] for name in self._config.space}
        return Proposal(trial.number, point, trial.user_attrs.get(ATTEMPTS, 1))

    def _record_of(self, trial: FrozenTrial) -> TrialRecord:
        """A finished trial as it travels, its point in the order of the space."""
        epochs = tuple(EpochMetrics.model_validate(e) for e in trial.user_attrs.get(EPOCHS, []))
        return TrialRecord.model_validate(
            {
                "number": trial.number,
                "state": FINISHED[trial.state.name],
                "point": self._proposal(trial).point,
                "auc": _best(epoch.validation_auc for epoch in epochs),
                "r2": _best(epoch.validation_r2 for epoch in epochs),
                "epochs": epochs,
                "seconds": trial.user_attrs.get(SECONDS, 0.0),
                "reason": trial.user_attrs.get(REASON, ""),
                "attempts": trial.user_attrs.get(ATTEMPTS, 1),
            }
        )

    def _open_trial(self, number: int) -> Trial:
        from optuna.trial import Trial

        return Trial(self._study, self._frozen(number)._trial_id)

    def _frozen(self, number: int) -> FrozenTrial:
        return self._trials()[number]

    def _trials(self) -> list[FrozenTrial]:
        with explained(self._storage):
            found: list[FrozenTrial] = self._study.get_trials(deepcopy=False)
        return found


def _best(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def searched_fields(config: space.SearchConfig) -> tuple[SearchedField, ...]:
    """The space as it travels."""
    return tuple(
        SearchedField(name=name, choices=tuple(dimension.names()))
        if isinstance(dimension, space.Choices)
        else SearchedField(name=name, low=dimension.low, high=dimension.high, log=dimension.log)
        for name, dimension in config.space.items()
    )


def distribution_of(dimension: space.Dimension) -> BaseDistribution:
    """A dimension of the space in Optuna's terms."""
    from optuna import distributions

    match dimension:
        case space.Choices():
            return distributions.CategoricalDistribution(dimension.names())
        case space.FloatRange(low=low, high=high, log=log):
            return distributions.FloatDistribution(low, high, log=log)
        case space.IntRange(low=low, high=high, log=log, step=step):
            return distributions.IntDistribution(low, high, log=log, step=step)


def sampler_of(config: space.SearchConfig, number: int) -> BaseSampler:
    """The sampler that chooses the point of trial `number`.

    Seeded for every trial: one that lived through all of them would, in a search that is run again,
    draw its first numbers a second time.
    """
    from optuna.samplers import RandomSampler, TPESampler

    seed = int(content_key(config.seed, number)[:8], 16)
    if config.sampler == "tpe":
        return TPESampler(n_startup_trials=RANDOM_TRIALS, seed=seed)
    return RandomSampler(seed=seed)


def pruner_of(config: space.SearchConfig) -> BasePruner:
    """The rule that ends trials early; its steps are epochs, counted from 1."""
    from optuna.pruners import MedianPruner, NopPruner

    if config.pruner == "median":
        # The first step that may end a trial is the one after the warm-up.
        return MedianPruner(n_startup_trials=WHOLE_TRIALS, n_warmup_steps=WARM_UP_EPOCHS + 1)
    return NopPruner()
