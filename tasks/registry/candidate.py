"""Registering: a trained and judged model as the candidate, an import, a name's owner, trials.

Trials of a search are runs of MLflow, nested under one run for the study.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tasks.contracts.base import ModelVersionRef
from tasks.contracts.conversion import ImportedProgram
from tasks.contracts.data import FeatureSnapshot, ValidatedDataset
from tasks.contracts.evaluation import EvaluationReport, Metric
from tasks.contracts.training import (
    CandidateModel,
    CompressedModel,
    EpochMetrics,
    RecalibratedModel,
    StudyRecord,
    TrainedModel,
    TrialRecord,
)
from tasks.kernel.errors import ConfigurationError, RegistryError
from tasks.kernel.files import write_atomically
from tasks.kernel.settings import ArtifactStore
from tasks.kernel.values import flattened
from tasks.registry.config import RegistryConfig
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import (
    CANDIDATE,
    COMPRESSED_TAG,
    INCUMBENT_TAG,
    MANIFEST_TAG,
    MODEL_FOLDER,
    NOBODY,
    ORIGIN_TAG,
    PICTURES,
    PROGRAM_TAG,
    RECALIBRATED_TAG,
    SNAPSHOT_TAG,
    TRAINED_BY_TAG,
    MetricPoint,
    RegisteredVersion,
    Registry,
    held_registry,
)
from tasks.registry.model_folder import VersionRecord, read_version, write_import, write_model

logger = logging.getLogger(__name__)

Draw = Callable[[EvaluationReport], Mapping[str, str]]
"""Draws how good a model is on the test rows; what it learnt MLflow draws by its metrics."""
_AGAINST_CHAMPION = re.compile(r"champion:(\d+)")


def register_candidate(
    trained: CandidateModel,
    evaluation: EvaluationReport,
    dataset: ValidatedDataset,
    config: RegistryConfig,
    location: RegistryLocation,
    store: ArtifactStore,
    code_commit: str,
    trained_by: str | None = None,
    draw: Draw = lambda _: {},
) -> ModelVersionRef:
    """Record the run, file the model and point the alias `candidate` at its version.

    The same program on the same snapshot is registered once: a repeated call finds the version and
    sets the alias again. The version comes into being in one transaction after its files are on
    disk, so an interrupted call leaves a run marked as running and no version; the next call marks
    that run failed, removes its files and begins anew.

    Raises:
        RegistryError: the three do not belong together, or MLflow refused.
        ArtifactError: the model is gone from the store, or damaged.
        TransientError: the registry was busy.
        StorageError: the disk refused.
    """
    _check_they_belong_together(trained, evaluation, dataset)
    tags = _tags(trained, dataset.snapshot, code_commit)
    with held_registry(location) as registry:
        version = _find_undamaged(
            registry, config.model_name, tags, lambda record: record.manifest is not None
        )
        if version is None:
            version = _register(registry, trained, evaluation, dataset, config, store, tags, draw)
        registry.end_run(version.run_id)
        handling = dataset.snapshot.handling.tags
        registry.set_tags(version, {INCUMBENT_TAG: _incumbent_of(evaluation), **handling})
        note_trainer(registry, version, trained_by)
        registry.set_alias(version, CANDIDATE)
    return version.ref


def note_trainer(registry: Registry, version: RegisteredVersion, trained_by: str | None) -> None:
    """Record who trained it; the first one stays, whoever has the same program registered again."""
    if trained_by is not None and TRAINED_BY_TAG not in version.tags:
        registry.set_tags(version, {TRAINED_BY_TAG: trained_by})


def _check_they_belong_together(
    trained: CandidateModel, evaluation: EvaluationReport, dataset: ValidatedDataset
) -> None:
    snapshot = dataset.snapshot.data.sha256
    claims = (
        ("evaluation", "program", evaluation.model_sha256, trained.program.sha256),
        ("evaluation", "snapshot", evaluation.snapshot_sha256, snapshot),
        ("trained model", "snapshot", trained.snapshot_sha256, snapshot),
    )
    for whose, what, seen, expected in claims:
        if seen != expected:
            raise RegistryError(
                f"the {whose} is of {what} {seen[:12]}, expected {expected[:12]}; nothing was "
                "registered. Train and evaluate on the same validated dataset"
            )
    if trained.columns != dataset.snapshot.columns:
        raise RegistryError(
            "the model's columns are not those of the snapshot it names; nothing was registered. "
            "Train again on this snapshot"
        )


def _find_undamaged(
    registry: Registry, name: str, tags: Mapping[str, str], is_same: Callable[[VersionRecord], bool]
) -> RegisteredVersion | None:
    """The version of this program and snapshot whose files are undamaged and described the same."""
    wanted = {tag: tags[tag] for tag in (PROGRAM_TAG, SNAPSHOT_TAG)}
    for version in registry.versions(name, wanted):
        record = read_version(version)
        if record.damage:
            logger.warning("%s is passed over: %s", version, "; ".join(record.damage))
        elif is_same(record):
            return version
    return None


def discard_half_runs(registry: Registry, config: RegistryConfig) -> None:
    """Clear up after killed processes: while we hold the lock, an unfinished run is a dead one."""
    finished = {version.run_id for version in registry.versions(config.model_name)}
    for run_id in registry.unfinished_runs(config.experiment):
        if run_id in finished:
            registry.end_run(run_id)
        else:
            logger.warning("run %s was cut off before its model was registered; discarded", run_id)
            registry.discard_run(run_id, "cut off before the model was registered")


def _register(
    registry: Registry,
    trained: CandidateModel,
    evaluation: EvaluationReport,
    dataset: ValidatedDataset,
    config: RegistryConfig,
    store: ArtifactStore,
    tags: dict[str, str],
    draw: Draw,
) -> RegisteredVersion:
    discard_half_runs(registry, config)
    snapshot = dataset.snapshot
    run_name = f"{snapshot.feature_service}-{trained.program.sha256[:8]}"
    run = registry.start_run(config.experiment, run_name, tags)
    # MLflow allows letters, digits and `_-. /:` in names.
    fields = flattened(trained.config)
    parameters = {re.sub(r"[^\w\-. /:]", "_", name): text for name, text in fields}
    registry.log(run.run_id, parameters, [*_learnt(trained), *_final(evaluation)])
    for name, picture in draw(evaluation).items():
        write_atomically(run.folder / PICTURES / name, picture)
    folder, commit = run.folder / MODEL_FOLDER, tags["code_commit"]
    manifest = write_model(folder, trained, evaluation, snapshot, config.model_name, commit, store)
    described = _describe(trained, evaluation)
    return registry.add_version(config.model_name, run, {**tags, MANIFEST_TAG: manifest}, described)


def _tags(trained: CandidateModel, snapshot: FeatureSnapshot, code_commit: str) -> dict[str, str]:
    made_from = {}
    if isinstance(trained, RecalibratedModel):
        made_from = {RECALIBRATED_TAG: str(trained.calibration.source.version)}
    if isinstance(trained, CompressedModel):
        made_from = {COMPRESSED_TAG: str(trained.compression.parent.version)}
    return {
        PROGRAM_TAG: trained.program.sha256,
        SNAPSHOT_TAG: trained.snapshot_sha256,
        **made_from,
        "code_commit": code_commit,
        "feature_service": snapshot.feature_service,
    }


def _learnt(trained: CandidateModel) -> Iterator[MetricPoint]:
    if isinstance(trained, TrainedModel):
        yield from epoch_points(trained.epochs)
        yield MetricPoint("best_epoch", trained.best_epoch)
        yield MetricPoint("num_parameters", trained.num_parameters)
        yield MetricPoint("training_s", trained.seconds)
    if isinstance(trained, RecalibratedModel):
        fit = trained.calibration.fit
        yield MetricPoint("map_slope", fit.map.slope)
        yield MetricPoint("map_slope_error", fit.slope_error)
        yield MetricPoint("map_intercept", fit.map.intercept)
        yield MetricPoint("map_intercept_error", fit.intercept_error)
        yield MetricPoint("map_num_rows", fit.num_rows)


def epoch_points(epochs: Iterable[EpochMetrics]) -> Iterator[MetricPoint]:
    """All numbers of some epochs."""
    for epoch in epochs:
        for name, value in epoch.model_dump(exclude={"epoch"}, exclude_none=True).items():
            yield MetricPoint(f"epoch_{name}", value, step=epoch.epoch)


def _final(evaluation: EvaluationReport) -> Iterator[MetricPoint]:
    judged = {"test": evaluation.overall, "baseline_model": evaluation.baseline_model}
    if evaluation.baseline is not None:
        judged["baseline"] = evaluation.baseline
    for owner, quality in judged.items():
        yield MetricPoint(f"{owner}_num_rows", quality.num_rows)
        for name, metric in quality:
            yield from _interval(f"{owner}_{name}", metric)
    for comparison in evaluation.comparisons:
        against = comparison.against.replace(":", "_")
        for name, metric in comparison:
            yield from _interval(f"{name}_{against}", metric)


def _interval(name: str, metric: object) -> Iterator[MetricPoint]:
    if isinstance(metric, Metric):
        yield MetricPoint(name, metric.value)
        yield MetricPoint(f"{name}_low", metric.low)
        yield MetricPoint(f"{name}_high", metric.high)


def _incumbent_of(evaluation: EvaluationReport) -> str:
    for comparison in evaluation.comparisons:
        if match := _AGAINST_CHAMPION.fullmatch(comparison.against):
            return match[1]
    return NOBODY


def _describe(trained: CandidateModel, evaluation: EvaluationReport) -> str:
    name, quality = evaluation.overall.primary_name, evaluation.overall.primary
    made = f"Trained on {trained.splits.train}"
    if isinstance(trained, RecalibratedModel):
        calibration = trained.calibration
        made = f"Version {calibration.source.version} recalibrated on {calibration.fit.window}"
    if isinstance(trained, CompressedModel):
        parent = trained.compression.parent.version
        made = f"Version {parent} compressed by {trained.compression.method}, {made}"
    return (
        f"{made}; test {name} {quality:.4f} on "
        f"{evaluation.overall.num_rows:,} rows, {evaluation.window}."
    )


def register_import(
    imported: ImportedProgram,
    config: RegistryConfig,
    location: RegistryLocation,
    store: ArtifactStore,
    code_commit: str,
    trained_by: str | None = None,
) -> ModelVersionRef:
    """Record where the program comes from and file it as a version of its model.

    The same program of the same origin and description is registered once. No alias points at it:
    nothing judged it against a champion.

    Raises:
        RegistryError: MLflow refused.
        ArtifactError: the program is gone from the store, or damaged.
        TransientError: the registry was busy.
        StorageError: the disk refused.
    """
    described = (imported.family, imported.signature, imported.columns)
    source = " ".join(imported.origin.get(name, "") for name in ("package", "version")).strip()
    tags = {
        PROGRAM_TAG: imported.program.sha256,
        SNAPSHOT_TAG: imported.origin_sha256,
        ORIGIN_TAG: source or "files",
        "family": imported.family,
        "code_commit": code_commit,
    }
    name = config.model_name

    def is_same(record: VersionRecord) -> bool:
        made = record.imported
        return made is not None and (made.family, made.signature, made.columns) == described

    with held_registry(location) as registry:
        version = _find_undamaged(registry, name, tags, is_same)
        if version is None:
            discard_half_runs(registry, config)
            run_name = f"import-{imported.program.sha256[:8]}"
            run = registry.start_run(config.experiment, run_name, tags)
            digests = {f"sha256.{name}": digest for name, digest in imported.files.items()}
            registry.log(run.run_id, {**imported.origin, **digests}, [])
            manifest = write_import(run.folder / MODEL_FOLDER, imported, name, code_commit, store)
            text = f"Trained elsewhere ({tags[ORIGIN_TAG]}); family {imported.family}."
            version = registry.add_version(name, run, {**tags, MANIFEST_TAG: manifest}, text)
        registry.end_run(version.run_id)
        note_trainer(registry, version, trained_by)
    return version.ref


SERVICE_TAG = "feature_service"
IMPORTS = "(imports)"
"""Owner of a name under which models are imported; no use case can be called so."""


def claim_model_name(
    use_case: str,
    service: str | None,
    config: RegistryConfig,
    location: RegistryLocation,
    *,
    reserve: bool,
) -> None:
    """See that the model name is this use case's, or nobody's, and note it as its owner.

    A model of an earlier release names no owner: it is the use case's whose feature service its
    newest version was trained on.

    Args:
        use_case: who wants to register under the name; `IMPORTS` for an import.
        service: feature service that it trains on; None for an import.
        config: the model name, and whose name is taken over.
        location: the registry.
        reserve: note the owner; else nothing is written.

    Raises:
        ConfigurationError: the name belongs to another use case. Nothing was written.
        TransientError: the registry was busy.
    """
    database = location.database_path
    if not reserve and database is not None and not database.exists():
        return
    name = config.model_name
    with held_registry(location) as registry:
        owner = registry.owner(name)
        if owner == use_case:
            return
        adopted = config.adopts is not None and owner in (None, config.adopts)
        if not adopted and not _is_free(registry, name, owner, service):
            raise ConfigurationError(
                f"model name {name!r} belongs to {_described(owner)}, and {_described(use_case)} "
                "names it too: each would replace the other's candidate and champion. Choose a "
                f'registry.model_name of its own, or set registry.adopts: "{owner or "NAME"}" '
                "where it continues that model. Nothing was written"
            )
        if reserve:
            if adopted:
                logger.warning("%s takes %s over from %s", use_case, name, config.adopts)
            registry.set_owner(name, use_case)


def _is_free(registry: Registry, name: str, owner: str | None, service: str | None) -> bool:
    versions = registry.versions(name) if owner is None else []
    trained_on = versions[-1].tags.get(SERVICE_TAG, service) if versions else service
    return owner is None and trained_on == service


def _described(owner: str | None) -> str:
    if owner is None:
        return "the use case of another feature service"
    return "imported models" if owner == IMPORTS else f"use case {owner}"


STUDY_TAG = "search_study"
TRIAL_TAG = "search_trial"
TRIAL_STATE_TAG = "search_state"
PARENT_TAG = "mlflow.parentRunId"
_WHOLE = "whole"  # what the study's own run bears in place of a number
_STATUS = {"complete": "FINISHED", "pruned": "KILLED", "failed": "FAILED"}


def record_trials(
    study: str, trials: Sequence[TrialRecord], config: RegistryConfig, location: RegistryLocation
) -> int:
    """Write those trials that have no run yet; returns how many were written.

    Safe to repeat: a trial has one run. One that was cut off while it was written is discarded and
    written anew.

    Raises:
        TransientError: the registry was busy.
        RegistryError: MLflow refused.
        StorageError: the disk refused.
    """
    with held_registry(location) as registry:
        known = registry.runs_by_tag(config.experiment, {STUDY_TAG: study}, TRIAL_TAG)
        whole = known.get(_WHOLE) or registry.start_run(
            config.experiment, study, {STUDY_TAG: study, TRIAL_TAG: _WHOLE}
        )
        for number, run in known.items():
            if number != _WHOLE and not run.is_complete:
                registry.discard_run(run.run_id, "cut off while it was written")
        lacking = [t for t in trials if not (r := known.get(str(t.number))) or not r.is_complete]
        for trial in lacking:
            _record(registry, config, study, whole.run_id, trial)
    return len(lacking)


def end_study(record: StudyRecord, config: RegistryConfig, location: RegistryLocation) -> None:
    """Write what trials are lacking, the best trial's AUC or R2, and end the study's own run.

    Raises:
        TransientError, RegistryError, StorageError: as `record_trials`.
    """
    record_trials(record.study, record.trials, config, location)
    with held_registry(location) as registry:
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


def _record(
    registry: Registry, config: RegistryConfig, study: str, parent: str, trial: TrialRecord
) -> None:
    tags = {
        STUDY_TAG: study,
        TRIAL_TAG: str(trial.number),
        TRIAL_STATE_TAG: trial.state,
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
