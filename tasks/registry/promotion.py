"""Moving the alias `champion`: only through the gates, the decision kept, the move last."""

from __future__ import annotations

import hashlib
import logging
from datetime import datetime

from tasks.contracts.base import ModelVersionRef
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.evaluation import EvaluationReport
from tasks.contracts.release import Approval, GateResult, ModelVariant, PromotionDecision
from tasks.kernel.errors import ArtifactError
from tasks.kernel.files import write_atomically
from tasks.kernel.settings import ArtifactStore, named_artifacts
from tasks.registry.approval import APPROVED, Answer, Question, consent, record_answer
from tasks.registry.config import PromotionConfig
from tasks.registry.connection import RegistryLocation, exclusive
from tasks.registry.gates import Evidence, judge
from tasks.registry.mlflow_registry import (
    CHAMPION,
    DECISION_SHA_TAG,
    DECISION_TAG,
    NOBODY,
    PREVIOUS_TAG,
    RegisteredVersion,
    Registry,
)
from tasks.registry.model_folder import read_version
from tasks.registry.standing import note_promotion

logger = logging.getLogger(__name__)


def promote(
    candidate: ModelVersionRef,
    evaluation: EvaluationReport,
    dataset: ValidatedDataset,
    variants: tuple[ModelVariant, ...],
    config: PromotionConfig,
    location: RegistryLocation,
    store: ArtifactStore,
    now: datetime,
) -> PromotionDecision:
    """Ask all gates; where all are open, point the alias `champion` at the candidate.

    A refusal is an outcome, not an error: it is returned and kept like a promotion, as
    `promotion/<digest>.json` of the run and as tags of the version. Gates are judged and the alias
    moved under one lock, so the champion that was compared with is the one that is replaced. The
    alias moves last: interrupted earlier, the old champion stays and the next call decides anew.
    A version that is the champion already is judged again but neither moved nor recorded again; if
    a gate is closed by now, `promoted` is False and the alias stays where it is.

    Where `config.approval` requires it, open gates are not enough: the first call writes the
    question down and the candidate waits, and only a recorded approval of that question lets the
    alias move (see `approval`).

    Raises:
        RegistryError: the version is gone or its tags were changed, or MLflow refused.
        TransientError: the registry was busy.
        StorageError: the disk refused; the alias was not moved.
    """
    registry = Registry(location)
    with exclusive(location):
        version = registry.confirmed(candidate)
        reigning = registry.by_alias(candidate.name, CHAMPION)
        evidence = Evidence(
            candidate=candidate,
            record=read_version(version),
            evaluation=evaluation,
            dataset=dataset,
            variants=variants,
            lost=_lost(evaluation, dataset, store),
            champion=None if reigning is None else reigning.ref,
            now=now,
            withdrawn=registry.why_withdrawn(version),
        )
        gates = judge(evidence, config)
        approval = None
        if config.approval.enabled and not _reigns(version, reigning):
            question = Question(
                candidate=candidate,
                evaluation=evaluation,
                dataset=dataset,
                variants=variants,
                config=config,
            )
            is_open = all(gate.passed for gate in gates)
            approval = consent(registry, version, question, now, ask=is_open)
        decision = _decide(version, reigning, gates, approval, config)
        if not _reigns(version, reigning):
            _record(registry, version, decision)
            if decision.promoted:
                note_promotion(registry, version, now)
                registry.set_alias(version, CHAMPION)
    _log(decision)
    return decision


def answer_and_promote(
    name: str,
    number: int,
    answer: Answer,
    location: RegistryLocation,
    store: ArtifactStore,
    *,
    digest: str | None = None,
    overrule: bool = False,
) -> PromotionDecision:
    """Record what a person said about a candidate, and decide through the same gates.

    Args:
        name: registered model.
        number: version that was asked about.
        answer: what was said, by whom, when.
        location: the registry.
        store: where the evidence lies.
        digest: question that the person saw; None for the one that was put last.
        overrule: let this answer replace an earlier one, and count after the deadline too.

    Raises:
        RegistryError: nobody was asked, or by now about something else.
        TransientError: the registry was busy.
        StorageError: the disk refused; the alias was not moved.
    """
    asked = record_answer(name, number, answer, location, digest=digest, overrule=overrule)
    return decide_question(asked, location, store, answer.given)


def decide_question(
    asked: Question, location: RegistryLocation, store: ArtifactStore, now: datetime
) -> PromotionDecision:
    """Ask the gates about the evidence of a question once more, and heed what was answered."""
    return promote(
        asked.candidate,
        asked.evaluation,
        asked.dataset,
        asked.variants,
        asked.config,
        location,
        store,
        now,
    )


def _reigns(version: RegisteredVersion, reigning: RegisteredVersion | None) -> bool:
    return reigning is not None and reigning.number == version.number


def _decide(
    version: RegisteredVersion,
    reigning: RegisteredVersion | None,
    gates: tuple[GateResult, ...],
    approval: Approval | None,
    config: PromotionConfig,
) -> PromotionDecision:
    previous = None if reigning is None else reigning.number
    agreed = not config.approval.enabled or (approval is not None and approval.state == APPROVED)
    if _reigns(version, reigning):
        agreed = True  # it is the champion: there is nothing left to agree to
        before = version.tags.get(PREVIOUS_TAG, NOBODY)
        previous = int(before) if before.isdigit() else None
    return PromotionDecision(
        candidate=version.ref,
        previous_champion=previous,
        gates=gates,
        promoted=agreed and all(gate.passed for gate in gates),
        approval=approval,
    )


def _lost(
    evaluation: EvaluationReport, dataset: ValidatedDataset, store: ArtifactStore
) -> tuple[str, ...]:
    """A sentence for each artifact of the evidence that is gone or damaged."""
    lost = []
    for artifact in (*named_artifacts(evaluation), *named_artifacts(dataset)):
        try:
            store.path(artifact)
        except ArtifactError as exc:
            lost.append(str(exc))
    return tuple(lost)


def _record(registry: Registry, version: RegisteredVersion, decision: PromotionDecision) -> None:
    text = decision.model_dump_json(indent=1) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = registry.run_folder(version.run_id) / "promotion" / f"{digest[:12]}.json"
    if not path.exists():
        write_atomically(path, text)
    tags = {DECISION_TAG: _summary(decision), DECISION_SHA_TAG: digest}
    if decision.promoted:
        tags[PREVIOUS_TAG] = str(decision.previous_champion or NOBODY)
    registry.set_tags(version, tags)


def _summary(decision: PromotionDecision) -> str:
    closed = [gate.name for gate in decision.gates if not gate.passed]
    if closed:
        return f"refused: {', '.join(closed)}"
    approval = decision.approval
    return "all gates open" if approval is None else f"all gates open, {_told(approval)}"


def _told(approval: Approval) -> str:
    by = f" by {approval.approver}" if approval.approver else ""
    return approval.state.replace("_", " ") + by


def _log(decision: PromotionDecision) -> None:
    ref = decision.candidate
    if decision.promoted:
        logger.info("%s version %d is the champion", ref.name, ref.version)
        return
    if decision.approval is not None:
        logger.info("%s version %d: %s", ref.name, ref.version, _told(decision.approval))
    for gate in decision.gates:
        if not gate.passed:
            logger.warning(
                "%s version %d: gate %s is closed: %s",
                ref.name,
                ref.version,
                gate.name,
                gate.evidence,
            )
