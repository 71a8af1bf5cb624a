"""Moving the alias `champion`: only through the gates, the decision kept, the move last."""

import logging
from datetime import datetime

from tasks.contracts import release
from tasks.contracts.base import Contract
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.evaluation import EvaluationReport
from tasks.governance import signing
from tasks.kernel.errors import ArtifactError, RegistryError
from tasks.kernel.settings import ArtifactStore, named_artifacts
from tasks.registry import approval as approvals
from tasks.registry.config import PromotionConfig
from tasks.registry.connection import RegistryLocation
from tasks.registry.gates import GATES, REGRESSION_GATES, Evidence, judge, settings_of
from tasks.registry.mlflow_registry import (
    CANDIDATE,
    CHAMPION,
    DECISION_SHA_TAG,
    DECISION_TAG,
    MANIFEST_FILE,
    MANIFEST_TAG,
    NOBODY,
    PREVIOUS_TAG,
    WITHDRAWN_TAG,
    RegisteredVersion,
    Registry,
    held_registry,
)
from tasks.registry.model_folder import read_version

logger = logging.getLogger(__name__)


def promote(
    asked: approvals.Question, location: RegistryLocation, store: ArtifactStore, now: datetime
) -> release.PromotionDecision:
    """Ask all gates; where all are open, point the alias `champion` at the candidate.

    A refusal is an outcome, not an error: it is returned and kept like a promotion, as
    `promotion/<digest>.json` of the run and as tags of the version. Gates are judged and the alias
    moved under one lock, so the champion that was compared with is the one that is replaced. The
    alias moves last: interrupted earlier, the old champion stays and the next call decides anew.
    A version that is the champion already is judged again but neither moved nor recorded again; if
    a gate is closed by now, `promoted` is False and the alias stays where it is.

    Where `asked.config.approval` requires it, open gates are not enough: the first call writes the
    question down and the candidate waits, and only a recorded approval of that question lets the
    alias move (see `approval`).

    Raises:
        RegistryError: the version is gone or its tags were changed, or MLflow refused.
        TransientError: the registry was busy.
        StorageError: the disk refused; the alias was not moved.
    """
    with held_registry(location) as registry:
        version, current, gates = _judged(asked, registry, store, now)
        approval = None
        if asked.config.approval.enabled and not _is_champion(version, current):
            is_open = all(gate.passed for gate in gates)
            approval = approvals.consent(registry, version, asked, now, ask=is_open)
        decision = _decide(version, current, gates, approval, asked.config)
        if not _is_champion(version, current):
            _record(registry, version, decision)
            if decision.promoted:
                note_promotion(registry, version, now)
                promoted = {MANIFEST_FILE: version.tags.get(MANIFEST_TAG, "")}
                signing.sign(version.state, f"promotions/{version.subject}", promoted)
                registry.set_alias(version, CHAMPION)
    _log(decision)
    return decision


def judge_only(
    asked: approvals.Question, location: RegistryLocation, store: ArtifactStore, now: datetime
) -> release.PromotionDecision:
    """What the gates say of a version at this moment. Nothing is moved, asked or recorded.

    Raises:
        RegistryError: the version is gone or its tags were changed, or MLflow refused.
        TransientError: the registry was busy.
    """
    version, current, gates = _judged(asked, Registry(location), store, now)
    before = None if current is None else current.number
    return release.PromotionDecision(
        candidate=version.ref, previous_champion=before, gates=gates, promoted=False
    )


def _judged(
    asked: approvals.Question, registry: Registry, store: ArtifactStore, now: datetime
) -> tuple[RegisteredVersion, RegisteredVersion | None, tuple[release.GateResult, ...]]:
    """The version, the champion by now, and every gate."""
    version = registry.confirmed(asked.candidate)
    current = registry.by_alias(asked.candidate.name, CHAMPION)
    evidence = Evidence(
        candidate=asked.candidate,
        record=read_version(version),
        evaluation=asked.evaluation,
        dataset=asked.dataset,
        variants=asked.variants,
        lost=_lost(asked.evaluation, asked.dataset, store),
        champion=None if current is None else current.ref,
        now=now,
        withdrawn=registry.why_withdrawn(version),
    )
    return version, current, judge(evidence, asked.config)


def answer_and_promote(
    name: str,
    number: int,
    answer: approvals.Answer,
    location: RegistryLocation,
    store: ArtifactStore,
    digest: str | None,
) -> release.PromotionDecision:
    """Record a person's answer about a candidate, and decide through the same gates.

    Args:
        name: registered model.
        number: version that was asked about.
        answer: the decision, by whom, when.
        location: the registry.
        store: holds the evidence.
        digest: question that the person saw; None for an order that overrules an earlier answer.

    Raises:
        RegistryError: nobody was asked, or by now about something else.
        TransientError: the registry was busy.
        StorageError: the disk refused; the alias was not moved.
    """
    asked = approvals.record_answer(name, number, answer, location, digest)
    return promote(asked, location, store, answer.given)


class OpenQuestion(Contract):
    """A question as it is put to a person; or, where nobody needs to be asked, why not."""

    digest: str
    decision: release.PromotionDecision
    markdown: str

    @property
    def is_open(self) -> bool:
        """True where a person is to be asked: all gates are open and nobody has answered yet."""
        approval = self.decision.approval
        return (
            approval is not None
            and approval.state == approvals.WAITING
            and not self.decision.closed
        )


def open_question(
    name: str,
    number: int,
    location: RegistryLocation,
    store: ArtifactStore,
    now: datetime,
    *,
    again: bool,
) -> OpenQuestion:
    """The question that waits for an answer, with the gates as they are at this moment.

    Args:
        name: registered model.
        number: version that was asked about.
        location: the registry.
        store: holds the evidence.
        now: this moment, UTC.
        again: ask again about a version that was answered, or whose time is over.

    Raises:
        RegistryError: nobody was asked, or the question cannot be read.
        TransientError: the registry was busy.
        StorageError: the disk refused.
    """
    registry = Registry(location)
    asked = approvals.read_question(registry, registry.version(name, number))
    decision = promote(asked, location, store, now)
    if again and not decision.promoted:
        asked = approvals.reopen_question(name, number, location, now)
        decision = promote(asked, location, store, now)
    text = approvals.describe(decision, registry.run_folder(asked.candidate.run_id))
    return OpenQuestion(digest=asked.digest, decision=decision, markdown=text)


def settle(
    name: str,
    number: int,
    digest: str,
    answer: approvals.Answer | None,
    location: RegistryLocation,
    store: ArtifactStore,
    now: datetime,
) -> release.PromotionDecision:
    """Record an answer and decide; without one, report what was settled elsewhere.

    Raises:
        RegistryError: by now another question was put, or nothing was settled.
        TransientError: the registry was busy.
        StorageError: the disk refused; the alias was not moved.
    """
    if answer is not None:
        return answer_and_promote(name, number, answer, location, store, digest)
    registry = Registry(location)
    asked = approvals.read_question(registry, registry.version(name, number))
    decision = promote(asked, location, store, now)
    if decision.approval is not None and decision.approval.state == approvals.WAITING:
        raise RegistryError(
            f"the run that asks about {name} version {number} was resumed as if the question were "
            "settled, and it is not. Nothing was changed; approve or reject it with "
            f"`falaj models approve {name} {number} --approver NAME`"
        )
    return decision


def _is_champion(version: RegisteredVersion, current: RegisteredVersion | None) -> bool:
    return current is not None and current.number == version.number


def _decide(
    version: RegisteredVersion,
    current: RegisteredVersion | None,
    gates: tuple[release.GateResult, ...],
    approval: release.Approval | None,
    config: PromotionConfig,
) -> release.PromotionDecision:
    previous = None if current is None else current.number
    agreed = not config.approval.enabled or (
        approval is not None and approval.state == approvals.APPROVED
    )
    if _is_champion(version, current):
        agreed, previous = True, _number(version.tags.get(PREVIOUS_TAG))
    return release.PromotionDecision(
        candidate=version.ref,
        previous_champion=previous,
        gates=gates,
        promoted=agreed and all(gate.passed for gate in gates),
        approval=approval,
    )


def _number(tag: str | None) -> int | None:
    return int(tag) if tag and tag.isdigit() else None


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


def _record(
    registry: Registry, version: RegisteredVersion, decision: release.PromotionDecision
) -> None:
    digest = registry.keep(version, "promotion/{}.json", decision)
    tags = {DECISION_TAG: _summary(decision), DECISION_SHA_TAG: digest}
    if decision.promoted:
        tags[PREVIOUS_TAG] = str(decision.previous_champion or NOBODY)
    registry.set_tags(version, tags)
    outcome = "ok" if decision.promoted else "refused" if decision.closed else "waits"
    closed = list(decision.closed)
    registry.record("decide-promotion", version.name, outcome, version=str(version), closed=closed)


def _summary(decision: release.PromotionDecision) -> str:
    if decision.closed:
        return f"refused: {', '.join(decision.closed)}"
    approval = decision.approval
    if approval is None:
        return "all gates open"
    by = f" by {approval.approver}" if approval.approver else ""
    return f"all gates open, {approval.state.replace('_', ' ')}{by}"


def _log(decision: release.PromotionDecision) -> None:
    subject = f"{decision.candidate.name} version {decision.candidate.version}"
    if decision.promoted:
        logger.info("%s is the champion", subject)
    elif decision.approval is not None:
        logger.info("%s %s", subject, decision.approval.outcome)
    for gate in decision.gates:
        if not gate.passed:
            limits = settings_of((REGRESSION_GATES | GATES)[gate.name])
            logger.warning(
                "%s: gate %s is closed: %s [%s]",
                subject,
                gate.name,
                gate.evidence,
                ", ".join(f"promotion.{name}" for name in limits) or "no setting opens it",
            )


PROMOTED_AT_TAG = "promoted_at"
RESTORED_BY_TAG = "restored_by"  # order that made it champion again; empty after a promotion
ROLLBACK_SHA_TAG = "rollback_sha256"
WITHDRAWAL_SHA_TAG = "withdrawal_sha256"
ROLLBACK_FILE = "rollback/{}.json"


def find_champion_state(
    name: str, location: RegistryLocation, now: datetime
) -> release.ChampionState | None:
    """The champion, since when, and its predecessor; None where there is no champion.

    Args:
        name: registered model.
        location: the registry.
        now: this moment, UTC; a question whose time is over waits for nobody.

    Raises:
        RegistryError: the champion was not registered by this pipeline, or MLflow refused.
        TransientError: the registry was busy.
    """
    if location.database_path is not None and not location.database_path.exists():
        return None
    registry = Registry(location)
    champion = registry.by_alias(name, CHAMPION)
    if champion is None:
        return None
    previous = _previous_champion(registry, champion)
    moment = champion.tags.get(PROMOTED_AT_TAG)
    restored = champion.tags.get(RESTORED_BY_TAG)
    return release.ChampionState(
        version=champion.ref,
        promoted_at=datetime.fromisoformat(moment) if moment and not restored else None,
        previous=previous.ref if previous else None,
        previous_trouble=_trouble(previous) if previous else None,
        asked_about=_asked_about(registry, champion, now),
    )


def note_promotion(registry: Registry, version: RegisteredVersion, now: datetime) -> None:
    """Note on a version, just before it becomes champion, that a promotion makes it that."""
    registry.set_tags(version, {PROMOTED_AT_TAG: now.isoformat(), RESTORED_BY_TAG: ""})


def roll_back(
    name: str, replaced: int, reason: str, order_id: str, location: RegistryLocation, now: datetime
) -> release.Rollback:
    """Point the alias `champion` at the champion before `replaced` again.

    The decision is kept as `rollback/<order>.json` with the run of the restored version and as its
    tags. Repeating an order that was carried out changes nothing and returns the same record.

    Args:
        name: registered model.
        replaced: version that must be the champion now.
        reason: why, for the record.
        order_id: who asked; one order rolls back once.
        location: the registry.
        now: moment for the record.

    Raises:
        RegistryError: another version is the champion by now, it has no predecessor, or that
            one's files are missing or damaged. The alias was not moved.
        TransientError: the registry was busy.
        StorageError: the disk refused; the alias was not moved.
    """
    with held_registry(location) as registry:
        champion = registry.by_alias(name, CHAMPION)
        if champion is not None and champion.tags.get(RESTORED_BY_TAG) == order_id:
            return _read_record(registry, champion, order_id)
        if champion is None or champion.number != replaced:
            seen = "nobody" if champion is None else f"version {champion.number}"
            raise RegistryError(
                f"{name}: the champion is {seen}, and version {replaced} was to be rolled back; it "
                "was replaced in between. The alias was not moved; check drift of the champion"
            )
        previous = _previous_champion(registry, champion)
        trouble = "it has no predecessor" if previous is None else _trouble(previous)
        if previous is None or trouble:
            raise RegistryError(
                f"{champion} cannot be rolled back to {previous or 'an earlier version'}: "
                f"{trouble}. The alias was not moved; take it from a backup with "
                "`falaj restore`, or train and promote another version"
            )
        record = release.Rollback(
            restored=previous.ref, replaced=champion.ref, reason=reason, order_id=order_id, at=now
        )
        digest = registry.keep(previous, ROLLBACK_FILE.format(order_id[:32]), record)
        registry.set_tags(previous, {ROLLBACK_SHA_TAG: digest, RESTORED_BY_TAG: order_id})
        registry.set_alias(previous, CHAMPION)
    logger.warning("%s is the champion again instead of version %d: %s", previous, replaced, reason)
    return record


def withdraw(
    name: str, number: int, reason: str, by: str, location: RegistryLocation, now: datetime
) -> release.Withdrawal:
    """Mark a version as one that must never serve again; where it is the champion, take it back.

    The newest earlier champion that is whole and was not withdrawn, nor made from such a one, is
    the champion again. Without one there is none, and the next candidate is compared with nobody.
    The record is kept as `withdrawal/<digest>.json` with the version's run. A call that was cut
    off is completed by the next one.

    Args:
        name: registered model.
        number: version to withdraw.
        reason: why, for the record.
        by: who says so.
        location: the registry.
        now: moment for the record.

    Raises:
        RegistryError: there is no such version.
        TransientError: the registry was busy.
        StorageError: the disk refused; no alias was moved.
    """
    with held_registry(location) as registry:
        version = registry.version(name, number)
        current = registry.pointed_at(name, CHAMPION)
        registry.set_tags(version, {WITHDRAWN_TAG: reason})
        champion = current
        if current is not None and registry.why_withdrawn(registry.version(name, current.number)):
            champion = _previous_champion(registry, current, whole=True)
        record = release.Withdrawal(
            version=version.ref,
            reason=reason,
            by=by,
            at=now,
            champion=champion.ref if champion else None,
        )
        digest = registry.keep(version, "withdrawal/{}.json", record)
        tags = {"withdrawn_at": now.isoformat(), "withdrawn_by": by, WITHDRAWAL_SHA_TAG: digest}
        registry.set_tags(version, tags)
        if champion is None:
            registry.remove_alias(name, CHAMPION)
        elif current is not None and champion.number != current.number:
            registry.set_tags(champion, {RESTORED_BY_TAG: f"withdrawal of version {number}"})
            registry.set_alias(champion, CHAMPION)
        candidate = registry.by_alias(name, CANDIDATE)
        if candidate is not None and registry.why_withdrawn(candidate):
            registry.remove_alias(name, CANDIDATE)
    logger.warning("%s was withdrawn by %s: %s", version, by, reason)
    return record


def _previous_champion(
    registry: Registry, champion: RegisteredVersion, *, whole: bool = False
) -> RegisteredVersion | None:
    """The champion before, or before that one where it was withdrawn, or `whole` and damaged."""
    known = {v.number: v for v in registry.versions(champion.name) if v.number != champion.number}
    version: RegisteredVersion | None = champion
    while version is not None:
        version = known.pop(_number(version.tags.get(PREVIOUS_TAG)) or 0, None)
        if version is None or registry.why_withdrawn(version):
            continue
        if not whole or (trouble := _trouble(version)) is None:
            return version
        logger.warning("%s is passed over: %s", version, trouble)
    return None


def _asked_about(registry: Registry, champion: RegisteredVersion, now: datetime) -> int | None:
    later = [v for v in registry.versions(champion.name) if v.number > champion.number]
    for version in sorted(later, key=lambda v: -v.number):
        try:
            approval = approvals.known_approval(version)
        except RegistryError as exc:  # its promotion is refused; the champion stands
            logger.warning("%s", exc)
            continue
        if approval is not None and approval.state == approvals.WAITING and now < approval.deadline:
            return version.number
    return None


def _trouble(version: RegisteredVersion) -> str | None:
    """Why a version cannot serve; None where every file has its digest."""
    record = read_version(version)
    problems = list(record.damage)
    if record.manifest is None and record.imported is None and not problems:
        problems.append("it has no readable manifest")
    if record.variants is None and not problems:
        problems.append("it has no converted variants, so nothing could serve it")
    return "; ".join(problems) or None


def _read_record(registry: Registry, version: RegisteredVersion, order_id: str) -> release.Rollback:
    path = registry.run_folder(version.run_id) / ROLLBACK_FILE.format(order_id[:32])
    try:
        return release.Rollback.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise RegistryError(
            f"{version} was restored by order {order_id[:12]}, and its record {path.name} is gone; "
            "the alias stays as it is"
        ) from exc
