"""A person's consent before the alias `champion` moves: the question, its answer, what is shown.

The question holds all that the gates looked at, so that an answer goes through the same gates
again, days later, on the same evidence. It is a file named by its digest; what became of it is in
tags of the version. The first answer counts. Nothing here moves an alias: see `promotion`.
"""

import base64
import hashlib
import logging
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final, Literal
from urllib.parse import quote

from pydantic import Field, PrivateAttr, ValidationError

from tasks.contracts.base import Contract, ModelVersionRef
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.evaluation import EvaluationReport
from tasks.contracts.release import Approval, ModelVariant, PromotionDecision
from tasks.kernel.errors import RegistryError
from tasks.kernel.settings import platform_address
from tasks.kernel.values import plain
from tasks.registry.config import PromotionConfig
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import PICTURES, RegisteredVersion, Registry, held_registry
from tasks.registry.model_folder import digest_of_value

logger = logging.getLogger(__name__)

STATE_TAG = "approval"
QUESTION_TAG = "approval_question"  # SHA-256 of the question's file
TAGS = {
    "asked": "approval_asked",
    "deadline": "approval_deadline",
    "answered": "approval_answered",
    "approver": "approver",
    "comment": "approval_comment",
}
"""Where the fields of an `Approval` are, but its state."""
WAITING: Final = "waiting"
APPROVED: Final = "approved"
REJECTED: Final = "rejected"
TIMED_OUT: Final = "timed_out"
QUESTION_FILE = "promotion/question-{}.json"
VISIBLE = r"[^\s\x1c-\x1f]"  # what `str.strip` leaves: it takes four separators that `\s` does not


class Question(Contract):
    """May this version be the champion? Gates are asked, and a person where `config` says so."""

    candidate: ModelVersionRef
    evaluation: EvaluationReport
    dataset: ValidatedDataset
    variants: tuple[ModelVariant, ...]
    config: PromotionConfig

    _kept: str = PrivateAttr(default="")

    @property
    def digest(self) -> str:
        """SHA-256 of the file that keeps it, which an earlier release may have written."""
        return self._kept or digest_of_value(self)


class Answer(Contract):
    """The decision of one person."""

    decision: Literal["approve", "reject"]
    approver: str = Field(min_length=1, max_length=200, pattern=VISIBLE)
    comment: str = Field(default="", max_length=2000)
    given: datetime = Field(description="When it was given, UTC.")


def consent(
    registry: Registry, version: RegisteredVersion, question: Question, now: datetime, *, ask: bool
) -> Approval | None:
    """What is known of a person's consent to a candidate; asks where nothing is.

    To be called while the registry is held. A rejection is of the version, whatever the evidence;
    an approval only of the question that was answered. A question whose time is over is closed.

    Args:
        registry: open registry.
        version: the candidate.
        question: what it is about.
        now: this moment, UTC.
        ask: write the question down where it has not been put; False while a gate is closed.
    """
    known = known_approval(version)
    if known is not None and known.state in (REJECTED, TIMED_OUT):
        return known
    if known is not None and version.tags.get(QUESTION_TAG) == question.digest:
        return _closed_in_time(registry, version, known, now)
    return put_question(registry, version, question, now) if ask else None


def put_question(
    registry: Registry, version: RegisteredVersion, question: Question, now: datetime
) -> Approval:
    """Write a question down, in place of any earlier one; from now on the version waits.

    Raises:
        StorageError: the disk refused. Nothing was asked.
    """
    deadline = now + timedelta(hours=question.config.approval.timeout_h)
    tags = {
        QUESTION_TAG: registry.keep(version, QUESTION_FILE, question),
        TAGS["asked"]: now.isoformat(),
        TAGS["deadline"]: deadline.isoformat(),
        STATE_TAG: WAITING,  # last: until then the version is as it was
    }
    registry.set_tags(version, tags)
    logger.info("%s waits for a person's approval until %s", version, deadline.isoformat())
    return Approval(state=WAITING, asked=now, deadline=deadline)


def read_question(registry: Registry, version: RegisteredVersion) -> Question:
    """The question that was last put about a version, its content checked against its digest.

    Raises:
        RegistryError: none was put, or its file is gone or was changed.
    """
    digest = version.tags.get(QUESTION_TAG)
    if digest is None:
        raise RegistryError(
            f"nobody was asked about {version}: a question is put when a promotion finds all gates "
            "open and `promotion.approval.enabled` is set. Run the promotion first; nothing was "
            "changed"
        )
    file = registry.run_folder(version.run_id) / QUESTION_FILE.format(digest[:12])
    try:
        content = file.read_bytes()
        question = Question.model_validate_json(content)
    except (OSError, ValidationError) as exc:
        raise RegistryError(
            f"the question about {version} cannot be read from {file} ({type(exc).__name__}); run "
            "the promotion again to put it again. Nothing was changed"
        ) from exc
    question._kept = hashlib.sha256(content).hexdigest()
    if question.digest != digest:
        raise RegistryError(
            f"the question about {version} in {file} has SHA-256 {question.digest[:12]}, expected "
            f"{digest[:12]}: it was changed. Run the promotion again to put it again. Nothing was "
            "changed"
        )
    return question


def reopen_question(name: str, number: int, location: RegistryLocation, now: datetime) -> Question:
    """Put the last question about a version again, where it was answered or its time is over.

    Raises:
        RegistryError: nobody was asked, or the question cannot be read.
        TransientError: the registry was busy.
        StorageError: the disk refused. Nothing was asked.
    """
    with held_registry(location) as registry:
        version = registry.version(name, number)
        question, known = read_question(registry, version), known_approval(version)
        if known is not None and known.state != WAITING:
            put_question(registry, version, question, now)
    return question


def record_answer(
    name: str, number: int, answer: Answer, location: RegistryLocation, digest: str | None
) -> Question:
    """Write down a person's answer; returns the question, to be decided on.

    Args:
        name: registered model.
        number: version that was asked about.
        answer: the decision, by whom, when.
        location: the registry.
        digest: question that the person saw: the first answer to it stays, and one that comes too
            late closes it. None for an order about the last question, which replaces an earlier
            answer and counts after the deadline too.

    Raises:
        RegistryError: nobody was asked, or by now about something else.
        TransientError: the registry was busy.
    """
    with held_registry(location) as registry:
        version = registry.version(name, number)
        question, known = read_question(registry, version), known_approval(version)
        if digest not in (None, question.digest):
            raise RegistryError(
                f"the answer about {version} is to question {str(digest)[:12]}, and by now another "
                f"one ({question.digest[:12]}) was put: the evidence or the gates' bounds changed. "
                "Nothing was changed; answer the newer one"
            )
        if digest is not None and known is not None:
            known = _closed_in_time(registry, version, known, answer.given)
        if digest is None or known is None or known.state == WAITING:
            _write_answer(registry, version, answer)
    return question


def close_question(
    name: str, number: int, location: RegistryLocation, now: datetime, digest: str
) -> bool:
    """Reject a candidate that nobody answered for in time.

    Returns:
        True where this question is closed by time-out now; False where it was answered, replaced,
        or still has time.

    Raises:
        RegistryError: the version is gone.
        TransientError: the registry was busy.
    """
    with held_registry(location) as registry:
        version = registry.version(name, number)
        known = known_approval(version)
        if known is None or version.tags.get(QUESTION_TAG) != digest:
            return False
        return _closed_in_time(registry, version, known, now).state == TIMED_OUT


def seconds_left(
    name: str, number: int, location: RegistryLocation, now: datetime, digest: str
) -> float | None:
    """Seconds until the time of a question is over, at least 0; None where it is settled.

    It is also settled where another question was put since.

    Raises:
        RegistryError: the version is gone.
        TransientError: the registry was busy.
    """
    version = Registry(location).version(name, number)
    known = known_approval(version)
    if known is None or known.state != WAITING or version.tags.get(QUESTION_TAG) != digest:
        return None
    return max(0.0, (known.deadline - now).total_seconds())


def known_approval(version: RegisteredVersion) -> Approval | None:
    """What the tags of a version hold of a person's consent; None where nobody was asked.

    Raises:
        RegistryError: the tags were edited and make no sense.
    """
    state = version.tags.get(STATE_TAG)
    if state is None:
        return None
    names = set(TAGS)
    if state not in (APPROVED, REJECTED):  # those of an earlier answer stay when it is put again
        names -= {"answered", "approver", "comment"}
    fields = {name: version.tags[TAGS[name]] for name in names if TAGS[name] in version.tags}
    try:
        return Approval.model_validate({"state": state, **fields})
    except ValidationError as exc:
        raise RegistryError(
            f"the approval tags of {version} were edited and make no sense "
            f"({', '.join(str(e['loc'][0]) for e in exc.errors())}); remove its tag {STATE_TAG!r} "
            "and run the promotion again. Nothing was changed"
        ) from exc


def _write_answer(registry: Registry, version: RegisteredVersion, answer: Answer) -> None:
    tags = {
        TAGS["approver"]: answer.approver.strip(),
        TAGS["comment"]: answer.comment.strip(),
        TAGS["answered"]: answer.given.isoformat(),
        STATE_TAG: APPROVED if answer.decision == "approve" else REJECTED,  # last
    }
    registry.set_tags(version, tags)
    logger.info("%s was %s by %s", version, tags[STATE_TAG], answer.approver)


def _closed_in_time(
    registry: Registry, version: RegisteredVersion, known: Approval, now: datetime
) -> Approval:
    """What is known, after a question whose time is over was closed."""
    if known.state != WAITING or now < known.deadline:
        return known
    registry.set_tags(version, {STATE_TAG: TIMED_OUT})
    logger.warning("%s is rejected: nobody answered before %s", version, known.deadline.isoformat())
    return known.model_copy(update={"state": TIMED_OUT})


MAX_PICTURE_BYTES = 200_000


def outcome(decision: PromotionDecision) -> str:
    """What became of a candidate, in a sentence without an end."""
    ref, approval = decision.candidate, decision.approval
    subject = f"{ref.name} version {ref.version}"
    if decision.promoted:
        by = f", approved by {approval.approver}" if approval and approval.approver else ""
        return f"{subject} is the champion{by}"
    if decision.closed:
        return f"{subject} was refused by gate {', '.join(decision.closed)}"
    return f"{subject} {'was not moved' if approval is None else approval.outcome}"


def describe(decision: PromotionDecision, run_folder: Path) -> str:
    """The question in Markdown: what is asked, the pictures as data URLs, the gates' table."""
    ref, before, approval = decision.candidate, decision.previous_champion, decision.approval
    place = f"takes the place of version {before}" if before else "becomes the first champion"
    lines = [
        f"## May {plain(ref.name)} version {ref.version} become the champion?",
        "",
        f"If you approve, it {place} after the gates below were asked once more. If you reject "
        "it, nothing changes and nobody is asked about this version again.",
        "",
    ]
    if approval is not None:
        lines += [f"**No answer until {approval.deadline:%Y-%m-%d %H:%M} UTC means no.**", ""]
    lines += [*_pictures(run_folder), "| gate | state | evidence |", "| --- | --- | --- |"]
    lines += [
        f"| {plain(gate.name)} | {'open' if gate.passed else '**CLOSED**'} | "
        f"{plain(gate.evidence)} |"
        for gate in decision.gates
    ]
    return "\n".join(lines) + "\n"


def _pictures(run_folder: Path) -> list[str]:
    """What registration drew, where it is small enough for a page; earlier releases drew PNG."""
    lines = []
    for file in sorted((run_folder / PICTURES).glob("*")):
        if file.stat().st_size <= MAX_PICTURE_BYTES:
            kind = "svg+xml" if file.suffix == ".svg" else "png"
            data = base64.b64encode(file.read_bytes()).decode()
            lines += [f"![{file.stem}](data:image/{kind};base64,{data})", ""]
    return lines


def announcement(ref: ModelVersionRef, run_folder: Path, home: Path) -> str:
    """What was registered, and where to read more.

    Args:
        ref: the version.
        run_folder: folder of the MLflow run's files, with the picture that was drawn.
        home: the state folder; a platform that runs on it is linked to.
    """
    base = platform_address(home, "mlflow_url")
    page = f"{base}/#/models/{quote(ref.name)}/versions/{ref.version}"
    found = f"[In MLflow]({page}) (asks for the platform's user and password)"
    lines = [
        f"## {plain(ref.name)} version {ref.version}",
        "",
        found if base else f"MLflow run `{plain(ref.run_id)}`",
        "",
        f"Lineage: `falaj trace models/{plain(ref.name)}/{ref.version}`",
        "",
    ]
    return "\n".join([*lines, *_pictures(run_folder)]) + "\n"
