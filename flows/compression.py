"""Compress: a registered version's network made smaller, and the way of every candidate."""

from prefect import flow

from flows.candidate import judge, validated_rows
from flows.config import PipelineConfig
from flows.recalibration import promoted
from flows.stages import RECORDED, check_places, devices
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.release import CompressionParent, CompressionResult
from tasks.contracts.training import DistillationTargets, TrainedModel
from tasks.control.leases.task import training_request
from tasks.evaluation.task import judge_student, score_model_window
from tasks.registry.task import claim_model_name, find_compression_parent
from tasks.reporting.task import publish_compression
from tasks.training.compression.plan import StudentPlan, chosen
from tasks.training.task import plan_student, train_distributed


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
        ConfigurationError: the network would be no smaller, or cannot be pruned, or the label is
            one of several classes.
        RegistryError: there is no such version, or its files are missing or damaged.
    """
    check_places(config)
    config.refuse_several_classes("model compression")
    claim_model_name(config.name, config.features.training_set.feature_service, config.registry)
    parent = find_compression_parent(version, config.registry)
    plan = plan_student(parent, config.compression, config.training)
    config = config.with_splits(parent.splits)
    dataset = validated_rows(config, splits=config.splits)
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
        evaluation = judge(model, dataset, config)
        released = promoted(model, evaluation, dataset, config)
        result = result.model_copy(update={"evaluation": evaluation, **released})
    publish_compression(result)
    return result


def train_with_control(
    plan: StudentPlan, parent: CompressionParent, dataset: ValidatedDataset, config: PipelineConfig
) -> tuple[TrainedModel | None, TrainedModel]:
    """Train what was planned, on leased devices: distilled, where that is asked for, and without.

    Both have the same start, rows, epochs and seed.
    """
    targets, compression = None, config.compression
    if compression.distils:
        scores = score_model_window(parent.program, dataset, config.splits.train, config.evaluation)
        targets = DistillationTargets(
            scores=scores, weight=compression.teacher_weight, temperature=compression.temperature
        )
    request = training_request(config.lease, config.training.device, config.training.num_ranks)
    with devices(request, config.lease):
        control = train_distributed(dataset, config.splits, plan.config, plan.initial)
        if targets is None:
            return None, control
        distilled = train_distributed(dataset, config.splits, plan.config, plan.initial, targets)
    return distilled, control
