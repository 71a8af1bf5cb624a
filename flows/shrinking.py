"""Compress: a registered version's network made smaller, and the way of every candidate."""

from __future__ import annotations

from typing import NamedTuple

from prefect import flow

from flows.config import PipelineConfig
from flows.conversion import conversion_flow
from flows.promotion import promotion_flow
from flows.stages import RECORDED
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.release import CompressionParent, CompressionResult
from tasks.contracts.training import CompressedModel, TrainedModel
from tasks.control.leases.task import leased, training_request
from tasks.evaluation.task import (
    fit_baseline_model,
    judge_candidate,
    judge_student,
    score_model_window,
)
from tasks.features.task import build_training_set
from tasks.kernel.provenance import code_commit
from tasks.kernel.settings import Settings
from tasks.lineage.task import record_version
from tasks.registry.task import (
    claim_model_name,
    find_incumbent,
    find_shrinking_parent,
    register_candidate,
)
from tasks.reporting.task import publish_compression
from tasks.training.compression.distillation import StudentPlan, chosen, lesson_of
from tasks.training.compression.task import plan_student
from tasks.training.task import train_distributed
from tasks.validation.suites import read_suite
from tasks.validation.task import validate_training_set


@flow(
    name="shrinking",
    flow_run_name="shrink-{config.registry.model_name}-{config.shrinking.method}",
    **RECORDED,
)
def shrinking_flow(config: PipelineConfig, version: int | None = None) -> CompressionResult:
    """Prune a version's network, or let a small one learn from it; what loses is not registered.

    It is trained on the rows of its parent's training, by the same launcher and loop, and judged,
    converted and promoted or refused as every candidate is. A network that had a teacher is
    compared with its twin that had none.

    Args:
        config: the use case; `config.shrinking` says how.
        version: number of the version to make smaller; None: the champion, or what that was made
            from where it is a smaller network itself.

    Raises:
        ConfigurationError: the network would be no smaller, or cannot be pruned.
        RegistryError: there is no such version, or its files are missing or damaged.
    """
    claim_model_name(config.name, config.features.training_set.feature_service, config.registry)
    parent = find_shrinking_parent(version, config.registry)
    plan = plan_student(parent, config.shrinking, config.training)
    config = config.with_splits(parent.splits)
    suite = read_suite(Settings.from_environment().feature_repo, config.features.training_set.suite)
    snapshot = build_training_set(config.window, config.features)
    dataset = validate_training_set(snapshot, suite, config.splits)

    twins = train_twins(plan, parent, dataset, config)
    choice = chosen(plan.shrinking, twins.taught, twins.untaught)
    model = choice.model
    judged = judge_student(
        model, parent.program, twins.taught, twins.untaught, dataset, config.evaluation
    )
    result = CompressionResult(
        shrinking=model.shrinking,
        hidden_sizes=plan.config.hidden_sizes,
        num_parameters=model.num_parameters,
        choice=choice.reason,
        judged=judged,
    )
    if judged.refusal:
        publish_compression(result, config.name)
        return result
    result = release(result, model, dataset, config)
    publish_compression(result, config.name)
    return result


def release(
    result: CompressionResult,
    model: CompressedModel,
    dataset: ValidatedDataset,
    config: PipelineConfig,
) -> CompressionResult:
    """The way of every candidate: judged, registered, converted, promoted or refused."""
    incumbent = find_incumbent(model, config.registry)
    baseline_model = fit_baseline_model(dataset, config.splits, config.baseline_model)
    evaluation = judge_candidate(model, dataset, incumbent, baseline_model, config.evaluation)
    commit = code_commit()
    version = register_candidate(model, evaluation, dataset, config.registry, commit)
    entities, staging = config.features.training_set.sql, config.staging_queries
    record_version(
        version, model, dataset, evaluation, entities, staging, commit, return_state=True
    )
    variants = conversion_flow(version, dataset, config)
    decision = promotion_flow(version, evaluation, dataset, variants, config)
    released = {"evaluation": evaluation, "version": version, "variants": variants}
    return result.model_copy(update={**released, "promotion": decision})


class Twins(NamedTuple):
    """The same network trained twice: with a teacher, where one is asked for, and without."""

    taught: TrainedModel | None
    untaught: TrainedModel


def train_twins(
    plan: StudentPlan, parent: CompressionParent, dataset: ValidatedDataset, config: PipelineConfig
) -> Twins:
    """Train what was planned, on leased devices; equal starts, rows, epochs and seeds."""
    lesson = None
    if config.shrinking.teaches:
        train = config.splits.train
        answers = score_model_window(parent.program, dataset, train, config.evaluation)
        lesson = lesson_of(answers, config.shrinking)
    device, num_ranks = config.training.device, config.training.num_ranks
    request = training_request(config.lease, device, num_ranks)
    with leased(request, config.lease):
        untaught = train_distributed(dataset, config.splits, plan.config, plan.initial)
        if lesson is None:
            return Twins(None, untaught)
        taught = train_distributed(dataset, config.splits, plan.config, plan.initial, lesson)
    return Twins(taught, untaught)
