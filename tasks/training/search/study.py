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
from tasks.training.search.config import Choices, SearchConfig
from tasks.training.search.space import Point, distributions, grid_point, told
from tasks.training.search.storage import StudyStorage, explained, load_optuna

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

LEAST_FOR_IMPORTANCE = 4
RANDOM_TRIALS = 5
"""First trials of `tpe`, which are drawn at random."""
WHOLE_TRIALS = 4
"""First trials that the median rule ends never: a median of fewer says little."""
WARM_UP_EPOCHS = 2
"""Epochs that every trial gets."""
REDUCTION_FACTOR = 3
"""Of hyperband: one of so many goes on at each halving."""
MAX_RETRIES = 2
"""Times that a trial is taken up again after its process or host was lost."""
EPOCHS, SECONDS, REASON, REPEATS, ATTEMPTS = "epochs", "seconds", "reason", "repeats", "attempts"


@dataclass(frozen=True)
class Proposal:
    """A trial that is to be run."""

    number: int
    point: Point
    attempt: int

    def __str__(self) -> str:
        return told(self.point)


class Study:
    """One open study.

    Args:
        name: of the study; made where there is none.
        storage: where it is kept.
        config: how it searches.
        max_epochs: most epochs of a trial.
    """

    def __init__(
        self, name: str, storage: StudyStorage, config: SearchConfig, max_epochs: int
    ) -> None:
        optuna = load_optuna()
        self.name = name
        self._storage = storage
        self._config = config
        self._max_epochs = max_epochs
        self._distributions = distributions(config)
        with explained(storage):
            self._study = optuna.create_study(
                study_name=name,
                storage=storage.open(),
                direction="maximize",
                load_if_exists=True,
                pruner=pruner_of(config, max_epochs),
            )

    def running(self) -> list[Proposal]:
        """Trials that were begun and not finished: of this search, or of one that was cut off."""
        return [self._proposal(t.number) for t in self._trials("RUNNING") if _repeats(t) is None]

    def propose(self) -> Proposal | None:
        """Begin the next trial; None where the study has all the trials that are asked for.

        A point that was tried before is not trained again: its trial takes the earlier one's
        outcome (see `settle_repeats`) and the next point is proposed.
        """
        while True:
            number = len(self._trials("COMPLETE", "PRUNED", "FAIL", "RUNNING"))
            if number >= self._config.num_trials or not self._prepare(number):
                return None
            with explained(self._storage):
                trial = self._study.ask(fixed_distributions=self._distributions)
                twin = self._twin_of(trial)
                if twin is None:
                    return self._proposal(trial.number)
                trial.set_user_attr(REPEATS, twin.number)
            self.settle_repeats()

    def _prepare(self, number: int) -> bool:
        """Set up the choice of trial `number`; False where the grid has no further point."""
        self._study.sampler = sampler_of(self._config, number)
        if self._config.sampler != "grid":
            return True
        point = grid_point(self._config, number)
        # One that waits already was left by a search that was cut off between the two steps.
        if point is not None and not self._trials("WAITING"):
            with explained(self._storage):
                self._study.enqueue_trial(dict(point))
        return point is not None

    def settle_repeats(self) -> None:
        """Give each trial of a repeated point the outcome of the first, once that has one."""
        first = {t.number: t for t in self._trials("COMPLETE", "PRUNED", "FAIL")}
        for trial in self._trials("RUNNING"):
            twin_number = _repeats(trial)
            twin = None if twin_number is None else first.get(twin_number)
            if twin is None:
                continue
            with explained(self._storage):
                for step, value in twin.intermediate_values.items():
                    self._open_trial(trial.number).report(value, step)
                self._copy_outcome(trial.number, twin)

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

    def complete(self, number: int, epochs: Sequence[EpochMetrics], seconds: float) -> None:
        """End a trial that was trained whole; its value is its best quality."""
        for epoch in epochs:
            self.report(number, epoch)
        self._keep(number, epochs, seconds, "")
        with explained(self._storage):
            self._study.tell(number, max(epoch.quality for epoch in epochs), skip_if_finished=True)

    def give_up(
        self,
        number: int,
        state: Literal["PRUNED", "FAIL"],
        epochs: Sequence[EpochMetrics],
        seconds: float,
        reason: str,
    ) -> None:
        """End a trial that was not worth going on, or whose training cannot succeed."""
        from optuna.trial import TrialState

        self._keep(number, epochs, seconds, reason)
        with explained(self._storage):
            self._study.tell(number, state=TrialState[state], skip_if_finished=True)

    def lose(self, number: int, reason: str) -> Proposal | None:
        """Note that a trial's process was lost; the trial to be taken up, None where it gave up."""
        attempt = self._proposal(number).attempt
        if attempt > MAX_RETRIES:
            self.give_up(number, "FAIL", (), 0.0, f"lost {attempt} times: {reason}")
            return None
        with explained(self._storage):
            self._open_trial(number).set_user_attr(ATTEMPTS, attempt + 1)
        return self._proposal(number)

    def is_finished(self, number: int) -> bool:
        """True where the trial's outcome is kept."""
        return self._frozen(number).state.is_finished()

    def trials(self) -> tuple[TrialRecord, ...]:
        """All finished trials, in the order in which they were begun."""
        finished = self._trials("COMPLETE", "PRUNED", "FAIL")
        return tuple(record_of(trial, list(self._distributions)) for trial in finished)

    def trial(self, number: int) -> TrialRecord:
        """One finished trial."""
        return record_of(self._frozen(number), list(self._distributions))

    @property
    def seconds(self) -> float:
        """Training seconds of all finished trials."""
        return sum(trial.seconds for trial in self.trials())

    def record(self, use_case: str, ended_because: str) -> StudyRecord:
        """The study as it stands."""
        config = self._config
        trials = self.trials()
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

        complete = self._trials("COMPLETE")
        if len(complete) < LEAST_FOR_IMPORTANCE or len({t.value for t in complete}) < 2:
            return {}
        evaluator = FanovaImportanceEvaluator(seed=self._config.seed)
        with explained(self._storage):
            found = get_param_importances(self._study, evaluator=evaluator)
        return {name: float(share) for name, share in found.items()}

    def _proposal(self, number: int) -> Proposal:
        """The trial as it is to be run; one cut off while its point was drawn gets the rest now."""
        with explained(self._storage):
            trial = self._open_trial(number)
            if set(trial.params) != set(self._distributions):
                self._study.sampler = sampler_of(self._config, number)
                for name, distribution in self._distributions.items():
                    trial._suggest(name, distribution)
            attempt = trial.user_attrs.get(ATTEMPTS, 1)
            point = {name: trial.params[name] for name in self._distributions}
            return Proposal(number=number, point=point, attempt=attempt)

    def _twin_of(self, trial: Trial) -> FrozenTrial | None:
        for other in self._trials("COMPLETE", "PRUNED", "FAIL", "RUNNING"):
            if other.number < trial.number and other.params == trial.params:
                first = _repeats(other)
                return other if first is None else self._frozen(first)
        return None

    def _copy_outcome(self, number: int, twin: FrozenTrial) -> None:
        epochs = [EpochMetrics.model_validate(e) for e in twin.user_attrs.get(EPOCHS, [])]
        self._keep(number, epochs, 0.0, twin.user_attrs.get(REASON, ""))
        values = list(twin.values) if twin.values and twin.state.name == "COMPLETE" else None
        self._study.tell(number, values, state=twin.state, skip_if_finished=True)

    def _keep(
        self, number: int, epochs: Sequence[EpochMetrics], seconds: float, reason: str
    ) -> None:
        with explained(self._storage):
            trial = self._open_trial(number)
            trial.set_user_attr(EPOCHS, [epoch.model_dump(mode="json") for epoch in epochs])
            trial.set_user_attr(SECONDS, seconds)
            trial.set_user_attr(REASON, reason)

    def _open_trial(self, number: int) -> Trial:
        from optuna.trial import Trial

        return Trial(self._study, self._frozen(number)._trial_id)

    def _frozen(self, number: int) -> FrozenTrial:
        with explained(self._storage):
            found: FrozenTrial = self._study.get_trials(deepcopy=False)[number]
        return found

    def _trials(self, *states: str) -> list[FrozenTrial]:
        from optuna.trial import TrialState

        with explained(self._storage):
            found: list[FrozenTrial] = self._study.get_trials(
                deepcopy=False, states=[TrialState[state] for state in states]
            )
        return found


def _repeats(trial: FrozenTrial) -> int | None:
    number = trial.user_attrs.get(REPEATS)
    return None if number is None else int(number)


def _best(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def record_of(trial: FrozenTrial, fields: Sequence[str]) -> TrialRecord:
    """A finished trial as it travels, its point in the order of `fields`."""
    states = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
    epochs = tuple(EpochMetrics.model_validate(e) for e in trial.user_attrs.get(EPOCHS, []))
    return TrialRecord.model_validate(
        {
            "number": trial.number,
            "state": states[trial.state.name],
            "point": {name: trial.params[name] for name in fields},
            "auc": _best(epoch.validation_auc for epoch in epochs),
            "r2": _best(epoch.validation_r2 for epoch in epochs),
            "epochs": epochs,
            "seconds": trial.user_attrs.get(SECONDS, 0.0),
            "reason": trial.user_attrs.get(REASON, ""),
            "repeats": _repeats(trial),
            "attempts": trial.user_attrs.get(ATTEMPTS, 1),
        }
    )


def searched_fields(config: SearchConfig) -> tuple[SearchedField, ...]:
    """The space as it travels."""
    return tuple(
        SearchedField(name=name, choices=tuple(dimension.names()))
        if isinstance(dimension, Choices)
        else SearchedField(name=name, low=dimension.low, high=dimension.high, log=dimension.log)
        for name, dimension in config.space.items()
    )


def sampler_of(config: SearchConfig, number: int) -> BaseSampler:
    """The sampler that chooses the point of trial `number`.

    Seeded anew for every trial: one that lived through all of them would, in a search that is run
    again, draw its first numbers a second time.
    """
    from optuna.samplers import RandomSampler, TPESampler

    seed = int(content_key(config.seed, number)[:8], 16)
    if config.sampler == "tpe":
        return TPESampler(n_startup_trials=RANDOM_TRIALS, seed=seed)
    return RandomSampler(seed=seed)  # of a grid, whose points are given, nothing is drawn


def pruner_of(config: SearchConfig, max_epochs: int) -> BasePruner:
    """The rule that ends trials early; its steps are epochs, counted from 1."""
    from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner

    if config.pruner == "median":
        # The first step that may end a trial is the one after the warm-up.
        return MedianPruner(n_startup_trials=WHOLE_TRIALS, n_warmup_steps=WARM_UP_EPOCHS + 1)
    if config.pruner == "hyperband":
        return HyperbandPruner(
            min_resource=min(WARM_UP_EPOCHS, max_epochs),
            max_resource=max_epochs,
            reduction_factor=REDUCTION_FACTOR,
        )
    return NopPruner()
