"""Moving the alias `champion`: only through the gates, the decision kept, the move last."""

from __future__ import annotations

import hashlib
import logging
from datetime import datetime

from tasks.contracts import (
    EvaluationReport,
    GateResult,
    ModelVariant,
    ModelVersionRef,
    PromotionDecision,
    ValidatedDataset,
)
from tasks.errors import ArtifactError
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
from tasks.settings import ArtifactStore, named_artifacts, write_atomically

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
        )
        decision = _decide(version, reigning, judge(evidence, config))
        if reigning is None or reigning.number != version.number:
            _record(registry, version, decision)
            if decision.promoted:
                registry.set_alias(version, CHAMPION)
    _log(decision)
    return decision


def _decide(
    version: RegisteredVersion, reigning: RegisteredVersion | None, gates: tuple[GateResult, ...]
) -> PromotionDecision:
    previous = None if reigning is None else reigning.number
    if previous == version.number:
        before = version.tags.get(PREVIOUS_TAG, NOBODY)
        previous = int(before) if before.isdigit() else None
    return PromotionDecision(
        candidate=version.ref,
        previous_champion=previous,
        gates=gates,
        promoted=all(gate.passed for gate in gates),
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
    return f"refused: {', '.join(closed)}" if closed else "all gates open"


def _log(decision: PromotionDecision) -> None:
    ref = decision.candidate
    if decision.promoted:
        logger.info("%s version %d is the champion", ref.name, ref.version)
        return
    for gate in decision.gates:
        if not gate.passed:
            logger.warning(
                "%s version %d: gate %s is closed: %s",
                ref.name,
                ref.version,
                gate.name,
                gate.evidence,
            )
