"""Prefect task of a smaller network: decides what is trained; `train_distributed` trains it."""

from __future__ import annotations

from prefect import get_run_logger, task

from tasks.contracts.release import CompressionParent
from tasks.kernel.retry_policy import RETRIED, ByContent
from tasks.kernel.settings import Settings
from tasks.training.compression.config import CompressionConfig
from tasks.training.compression.plan import StudentPlan
from tasks.training.config import TrainingConfig


@task(
    name="plan-student",
    task_run_name="plan-{config.method}-of-v{parent.program.version.version}",
    **RETRIED,
    timeout_seconds=600,
    persist_result=True,
    result_serializer="json",
    cache_policy=ByContent(task_file=__file__),
)
def plan_student(
    parent: CompressionParent, config: CompressionConfig, present: TrainingConfig
) -> StudentPlan:
    """Decide what a smaller network is, and prune the parent where that is asked for.

    Safe to retry: the pruned weights appear whole, under a key of their content, or not at all.

    Raises:
        ConfigurationError: the network would be no smaller, or cannot be pruned. Not retried.
        ArtifactError: the parent's checkpoint is absent or damaged. Not retried.
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.training.compression import plan as planning

    plan = planning.plan_student(parent, config, present, Settings.from_environment().store)
    get_run_logger().info(
        "%s: hidden layers of %s units, the large network has %s",
        config.method,
        "-".join(map(str, plan.config.hidden_sizes)),
        "-".join(map(str, plan.compression.parent_sizes)),
    )
    return plan
