"""Trials of a search as runs of MLflow, nested under one run for the study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tasks.contracts.training import StudyRecord, TrialRecord
from tasks.registry.candidate import epoch_points
from tasks.registry.config import RegistryConfig
from tasks.registry.connection import RegistryLocation, exclusive
from tasks.registry.mlflow_registry import MetricPoint, Registry

STUDY_TAG = "search_study"
TRIAL_TAG = "search_trial"
STATE_TAG = "search_state"
PARENT_TAG = "mlflow.parentRunId"
_WHOLE = "whole"  # what the study's own run bears in place of a number
_STATUS = {"complete": "FINISHED", "pruned": "KILLED", "failed": "FAILED"}


def record_trials(
    study: str,
    trials: Sequence[TrialRecord],
    config: RegistryConfig,
    location: RegistryLocation,
) -> int:
    """Write those trials that have no run yet; returns how many were written.

    Safe to repeat: a trial has one run. One that was cut off while it was written is discarded and
    written anew.

    Raises:
        TransientError: the registry was busy.
        RegistryError: MLflow refused.
        StorageError: the disk refused.
    """
    registry = Registry(location)
    with exclusive(location):
        known = registry.runs_by_tag(config.experiment, {STUDY_TAG: study}, TRIAL_TAG)
        parent = known[_WHOLE].run_id if _WHOLE in known else _start_study(registry, config, study)
        for number, run in known.items():
            if number != _WHOLE and not run.is_complete:
                registry.discard_run(run.run_id, "cut off while it was written")
        lacking = [t for t in trials if not (r := known.get(str(t.number))) or not r.is_complete]
        for trial in lacking:
            _record(registry, config, study, parent, trial)
    return len(lacking)


def end_study(record: StudyRecord, config: RegistryConfig, location: RegistryLocation) -> None:
    """Write what trials are lacking, the best trial's AUC or R2, and end the study's own run.

    Raises:
        TransientError, RegistryError, StorageError: as `record_trials`.
    """
    record_trials(record.study, record.trials, config, location)
    registry = Registry(location)
    with exclusive(location):
        known = registry.runs_by_tag(config.experiment, {STUDY_TAG: record.study}, TRIAL_TAG)
        states: list[str] = [trial.state for trial in record.trials]
        points = [
            MetricPoint(f"trials_{state}", states.count(state), step=len(states))
            for state in _STATUS
        ]
        best = next((t for t in record.trials if t.number == record.best), None)
        if best is not None and best.quality is not None:
            points.append(MetricPoint(_best_name(best), best.quality, step=len(states)))
            points.append(MetricPoint("best_trial", best.number, step=len(states)))
        registry.log(known[_WHOLE].run_id, {}, points)
        registry.end_run(known[_WHOLE].run_id)


def _start_study(registry: Registry, config: RegistryConfig, study: str) -> str:
    tags = {STUDY_TAG: study, TRIAL_TAG: _WHOLE}
    return registry.start_run(config.experiment, study, tags).run_id


def _record(
    registry: Registry, config: RegistryConfig, study: str, parent: str, trial: TrialRecord
) -> None:
    tags = {
        STUDY_TAG: study,
        TRIAL_TAG: str(trial.number),
        STATE_TAG: trial.state,
        PARENT_TAG: parent,
        **({"reason": trial.reason} if trial.reason else {}),
    }
    run = registry.start_run(config.experiment, f"{study}-trial-{trial.number}", tags)
    parameters = {name: str(value) for name, value in trial.point.items()}
    registry.log(run.run_id, parameters, list(_points(trial)))
    registry.end_run(run.run_id, _STATUS[trial.state])


def _best_name(trial: TrialRecord) -> str:
    return "best_validation_auc" if trial.r2 is None else "best_validation_r2"


def _points(trial: TrialRecord) -> Iterator[MetricPoint]:
    yield from epoch_points(trial.epochs)
    if trial.quality is not None:
        yield MetricPoint(_best_name(trial), trial.quality)
    yield MetricPoint("training_s", trial.seconds)
    yield MetricPoint("attempts", trial.attempts)
