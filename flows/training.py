"""Train: a validated training set, Horovod ranks, a judged and registered candidate.

Search: many trainings of one use case, guided and cut short by what the earlier ones learnt.
"""

import os
from collections.abc import Callable

from prefect import flow
from prefect.logging import get_run_logger

from flows.candidate import judge, register, validated_rows
from flows.config import PipelineConfig
from flows.stages import FOUND, RECORDED, called, check_places, devices
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.release import TrainingResult
from tasks.contracts.training import SearchResult, StudyRecord, TrialRecord
from tasks.control.leases.task import training_request
from tasks.control.routing.task import dump_parameters
from tasks.evaluation.task import check_test_window
from tasks.features.task import rank_single_features
from tasks.governance.handling import Placement
from tasks.kernel.errors import TransientError
from tasks.kernel.process import report_progress
from tasks.kernel.settings import Settings
from tasks.registry.task import claim_model_name, end_study, find_start, record_trials
from tasks.reporting.task import publish_search
from tasks.training.models.making import check_model
from tasks.training.models.source import source_digest
from tasks.training.search.config import configured, described
from tasks.training.search.storage import StudyStorage
from tasks.training.search.study import Proposal, Study
from tasks.training.search.trial import Driver, TrialOrder, check_any_succeeded, study_name
from tasks.training.task import run_trial, search_folder, train_distributed


@flow(
    name="training",
    flow_run_name="train-{config.registry.model_name}-{config.splits.train.slug}",
    **RECORDED,
)
def training_flow(config: PipelineConfig) -> TrainingResult:
    """Train on the use case's splits and register the result as the candidate.

    Args:
        config: The use case.

    Raises:
        ConfigurationError: it asks for an extra that is not installed here, or for a model that is
            not found.
    """
    check_places(config)
    check_model(config.training, Settings.from_environment().feature_repo)
    claim_model_name(config.name, config.features.training_set.feature_service, config.registry)
    dataset = validated_rows(config, splits=config.splits)
    check_test_window(dataset, config.splits, config.evaluation)
    ranking = rank_single_features(dataset.snapshot, config.splits, config.features)
    initial = None
    if config.training.start == "champion":
        training = config.training.model_dump(mode="json")
        initial = find_start(dataset, config.splits, training, config.registry)
    device = config.training.device if config.training.has_network else "cpu"
    request = training_request(config.lease, device, config.training.num_ranks)
    with devices(request, config.lease):
        model = train_distributed(dataset, config.splits, config.training, initial)
    evaluation = judge(model, dataset, config, ranking)
    version = register(model, evaluation, dataset, config)
    return TrainingResult(dataset=dataset, model=model, evaluation=evaluation, version=version)


POLL_S = 2.0


@flow(name="search", flow_run_name="search-{config.name}-{config.splits.train.slug}", **RECORDED)
def search_flow(config: PipelineConfig, make_candidate: bool = False) -> SearchResult:
    """Walk the use case's search space and keep the best trial's model.

    Args:
        config: The use case; `config.search` says what to try.
        make_candidate: Judge the best model and register it as the candidate.
    """
    check_places(config)
    check_model(config.training, Settings.from_environment().feature_repo)
    claim_model_name(config.name, config.features.training_set.feature_service, config.registry)
    dataset = validated_rows(config, splits=config.splits)
    study = run_trials(dataset, config)
    best = with_best_trial(config, study)
    model = train_distributed(dataset, best.splits, best.training)  # trained already: reused
    end_study(study, config.registry)
    page = publish_search(study)
    version = called(training_flow, best).version if make_candidate else None
    return SearchResult(study=study, model=model, page=page, version=version)


def run_trials(dataset: ValidatedDataset, config: PipelineConfig) -> StudyRecord:
    """Run the study's trials, those that an earlier search began first; none is run twice.

    Raises:
        TransientError: another process drives the study, or its database does not answer.
        TrainingError: no trial gave a model.
        FalajError: what a trial met that says nothing about its point.
    """
    settings, logger = Settings.from_environment(), get_run_logger()
    base, search = config.training, config.search
    own = source_digest(base.own_model, settings.feature_repo) if base.own_model else ""
    name = study_name(dataset, config.splits, base, search, own)
    storage = StudyStorage.of(search.storage, search_folder(settings), os.environ)
    run: Callable[..., object] = _on_work_pool if search.work_pool else trial_flow

    def run_one(proposal: Proposal) -> None:
        run(TrialOrder.of(name, proposal, base, search), dataset, config)

    def log(trial: TrialRecord) -> None:
        done, total = len(study.trials()), search.num_trials
        logger.info("%s", trial_in_words(trial, done, total))
        report_progress("trials", done, total, f"trial {done} of {total}")

    with storage.held(name):
        study = Study(name, storage, search, base.judged_epochs)
        reason = Driver(study, search, run_one, log).drive()
        check_any_succeeded(study)
        return study.record(config.name, reason)


def with_best_trial(config: PipelineConfig, study: StudyRecord) -> PipelineConfig:
    """The use case with the best trial's training configuration, and nothing else changed."""
    best = next(trial for trial in study.trials if trial.number == study.best)
    return config.model_copy(update={"training": configured(config.training, best.point)})


def trial_in_words(trial: TrialRecord, num_done: int, num_trials: int) -> str:
    """One line about a trial that ended."""
    quality = "no epoch" if not trial.epochs else f"{trial.epochs[-1].quality_name} "
    quality += "" if trial.quality is None else f"{trial.quality:.4f}"
    return (
        f"trial {trial.number:>3} {trial.state:<8} {quality} in {len(trial.epochs)} epochs, "
        f"{trial.seconds:.0f} s ({num_done} of {num_trials}): {described(trial.point)}"
    )


def _on_work_pool(order: TrialOrder, dataset: ValidatedDataset, config: PipelineConfig) -> None:
    """Run the trial's deployment and wait; a search that is run again finds the same run.

    Raises:
        TransientError: the run crashed, failed or was cancelled; the outcome is not in the study.
    """
    from prefect.deployments import run_deployment

    check_places(config, Placement("trial", f"pool:{config.search.work_pool}"))
    run_deployment_now: Callable[..., object] = run_deployment
    run = run_deployment_now(
        f"trial/{config.search.work_pool}",
        parameters=dump_parameters(trial_flow, order, dataset, config),
        idempotency_key=order.key,
        as_subflow=True,
        poll_interval=POLL_S,
    )
    state = getattr(run, "state", None)
    if state is None or not state.is_completed():
        raise TransientError(
            f"the flow run of trial {order.number} ended {getattr(state, 'name', 'unknown')}: "
            f"{getattr(state, 'message', None) or 'no message'}"
        )


@flow(name="trial", flow_run_name="trial-{order.number}-of-{order.study}", **FOUND)
def trial_flow(order: TrialOrder, dataset: ValidatedDataset, config: PipelineConfig) -> TrialRecord:
    """Train one point, keep the outcome in the study, and write it to MLflow.

    Args:
        order: Which trial of which study, and its point.
        dataset: Validated rows.
        config: The use case.
    """
    check_places(config)
    trial = run_trial(order, dataset, config.splits)
    record_trials(order.study, (trial,), config.registry)
    return trial
