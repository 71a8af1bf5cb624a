"""Compress: a registered version's network made smaller, and the way of every candidate."""

from __future__ import annotations

from prefect import flow

from flows.config import PipelineConfig
from flows.conversion import conversion_flow
from flows.promotion import promotion_flow
from flows.stages import RECORDED
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.release import CompressionParent, CompressionResult
from tasks.contracts.training import CompressedModel, DistillationTargets, TrainedModel
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
    find_compression_parent,
    find_incumbent,
    register_candidate,
)
from tasks.reporting.task import publish_compression
from tasks.training.compression.plan import StudentPlan, chosen
from tasks.training.compression.task import plan_student
from tasks.training.task import train_distributed
from tasks.validation.suites import read_suite
from tasks.validation.task import validate_training_set


@flow(
    name="model-compression",
    flow_run_name="compress-{config.registry.model_name}-{config.compression.method}",
    **RECORDED,
)
def model_compression_flow(config: PipelineConfig, version: int | None = None) -> CompressionResult:
    """Prune a version's network, or let a small one learn from it; what loses is not registered.

    It is trained on the rows of its parent's training, by the same launcher and loop, and judged,
    converted and promoted or refused as every candidate is. A network that had a teacher is
    compared with a control run that had none.

    Args:
        config: the use case; `config.compression` says how.
        version: number of the version to make smaller; None: the champion, or what that was made
            from where it is a smaller network itself.

    Raises:
        ConfigurationError: the network would be no smaller, or cannot be pruned.
        RegistryError: there is no such version, or its files are missing or damaged.
    """
    claim_model_name(config.name, config.features.training_set.feature_service, config.registry)
    parent = find_compression_parent(version, config.registry)
    plan = plan_student(parent, config.compression, config.training)
    config = config.with_splits(parent.splits)
    suite = read_suite(Settings.from_environment().feature_repo, config.features.training_set.suite)
    snapshot = build_training_set(config.window, config.features)
    dataset = validate_training_set(snapshot, suite, config.splits)

    distilled, control = train_with_control(plan, parent, dataset, config)
    model, reason = chosen(plan.compression, distilled, control)
    judged = judge_student(model, parent.program, distilled, control, dataset, config.evaluation)
    result = CompressionResult(
        compression=model.compression,
        hidden_sizes=plan.config.hidden_sizes,
        num_parameters=model.num_parameters,
        choice=reason,
        judged=judged,
    )
    if not judged.refusal:
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


def train_with_control(
    plan: StudentPlan,
    parent: CompressionParent,
    dataset: ValidatedDataset,
    config: PipelineConfig,
) -> tuple[TrainedModel | None, TrainedModel]:
    """Train what was planned, on leased devices: distilled, where that is asked for, and without.

    Both have the same start, rows, epochs and seed.
    """
    targets, compression = None, config.compression
    if compression.distils:
        train = config.splits.train
        scores = score_model_window(parent.program, dataset, train, config.evaluation)
        targets = DistillationTargets(
            scores=scores, weight=compression.teacher_weight, temperature=compression.temperature
        )
    request = training_request(config.lease, config.training.device, config.training.num_ranks)
    with leased(request, config.lease):
        control = train_distributed(dataset, config.splits, plan.config, plan.initial)
        if targets is None:
            return None, control
        distilled = train_distributed(dataset, config.splits, plan.config, plan.initial, targets)
    return distilled, control
