"""Train: a validated training set, Horovod ranks, a judged and registered candidate."""

from __future__ import annotations

from prefect import flow

from flows.config import PipelineConfig
from flows.stages import RECORDED
from tasks.contracts.release import TrainingResult
from tasks.control.leases.task import leased, training_request
from tasks.evaluation.task import check_test_window, fit_baseline_model, judge_candidate
from tasks.features.task import build_training_set, rank_single_features
from tasks.kernel.provenance import code_commit
from tasks.kernel.settings import Settings
from tasks.lineage.task import record_version
from tasks.registry.task import claim_model_name, find_incumbent, find_start, register_candidate
from tasks.training.task import train_distributed
from tasks.validation.suites import read_suite
from tasks.validation.task import validate_training_set


@flow(
    name="training",
    flow_run_name="train-{config.registry.model_name}-{config.splits.train.slug}",
    persist_result=True,
    result_serializer="json",
    **RECORDED,
)
def training_flow(config: PipelineConfig) -> TrainingResult:
    """Train on the use case's splits and register the result as the candidate.

    Args:
        config: The use case.

    Raises:
        ConfigurationError: it asks for an extra that is not installed here.
    """
    config.training.check_installed()
    claim_model_name(config.name, config.features.training_set.feature_service, config.registry)
    suite = read_suite(Settings.from_environment().feature_repo, config.features.training_set.suite)
    snapshot = build_training_set(config.window, config.features)
    dataset = validate_training_set(snapshot, suite, config.splits)
    check_test_window(dataset, config.splits, config.evaluation)
    ranking = rank_single_features(snapshot, config.splits, config.features)
    initial = None
    if config.training.start == "champion":
        training = config.training.model_dump(mode="json")
        initial = find_start(dataset, config.splits, training, config.registry)
    device, num_ranks = config.training.device, config.training.num_ranks
    request = training_request(config.lease, device, num_ranks)
    with leased(request, config.lease):
        model = train_distributed(dataset, config.splits, config.training, initial)
    baseline_model = fit_baseline_model(dataset, config.splits, config.baseline_model)
    incumbent = find_incumbent(model, config.registry)
    evaluation = judge_candidate(
        model, dataset, incumbent, baseline_model, config.evaluation, ranking
    )
    commit = code_commit()
    version = register_candidate(model, evaluation, dataset, config.registry, commit)
    trained = TrainingResult(dataset=dataset, model=model, evaluation=evaluation, version=version)
    entities, staging = config.features.training_set.sql, config.staging_queries
    record_version(
        version, model, dataset, evaluation, entities, staging, commit, return_state=True
    )
    return trained
