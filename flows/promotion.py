"""Promote: ask every gate, and move the champion only if all are open."""

from __future__ import annotations

from prefect import flow

from flows.config import PipelineConfig
from tasks.contracts import (
    EvaluationReport,
    ModelVariant,
    ModelVersionRef,
    PromotionDecision,
    ValidatedDataset,
)
from tasks.lineage.task import RECORDED
from tasks.registry.task import promote_candidate


@flow(
    name="promotion",
    flow_run_name="promote-{candidate.name}-v{candidate.version}",
    persist_result=True,
    result_serializer="json",
    **RECORDED,
)
def promotion_flow(
    candidate: ModelVersionRef,
    evaluation: EvaluationReport,
    dataset: ValidatedDataset,
    variants: tuple[ModelVariant, ...],
    config: PipelineConfig,
) -> PromotionDecision:
    """Decide on a candidate; a refusal is a result, not a failure.

    Args:
        candidate: the registered version.
        evaluation: its judgement on the test window.
        dataset: the validated rows it was trained and judged on.
        variants: its converted forms.
        config: the use case, with the gates' bounds.
    """
    return promote_candidate(candidate, evaluation, dataset, variants, config.promotion)
