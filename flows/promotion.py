"""Promote: check every gate, ask a person where the use case wants it, move the champion."""

from __future__ import annotations

from prefect import flow
from prefect.events import emit_event

from flows.approval import model_labels, start_approval
from flows.config import PipelineConfig
from flows.stages import RECORDED
from tasks.contracts.base import ModelVersionRef
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.evaluation import EvaluationReport
from tasks.contracts.release import ModelVariant, PromotionDecision
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

    Where `config.promotion.approval` requires a person's consent, the candidate stays one, and a
    run of `approval` asks for it.

    Args:
        candidate: The registered version.
        evaluation: Its judgement on the test window.
        dataset: The validated rows it was trained and judged on.
        variants: Its converted forms.
        config: The use case, with the gates' bounds.
    """
    decision = promote_candidate(candidate, evaluation, dataset, variants, config.promotion)
    announce_refusal(decision)
    start_approval(decision)
    return decision


def announce_refusal(decision: PromotionDecision) -> None:
    """Emit the event of a refusal, where a gate is closed."""
    closed = [gate for gate in decision.gates if not gate.passed]
    ref, before = decision.candidate, decision.previous_champion
    if not closed or before == ref.version:
        return
    emit_event(
        "falaj.promotion.refused",
        resource=model_labels(ref.name),
        payload={
            "model": ref.name,
            "version": ref.version,
            "champion": before,
            "closed": [{"gate": gate.name, "evidence": gate.evidence} for gate in closed],
        },
    )
