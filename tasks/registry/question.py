"""A question about a candidate as a person sees it: what is asked, the picture, the gates."""

from __future__ import annotations

import base64
from datetime import datetime
from html import escape
from pathlib import Path
from urllib.parse import quote

from tasks.contracts.base import Contract, ModelVersionRef
from tasks.contracts.evaluation import EvaluationReport
from tasks.contracts.release import PromotionDecision
from tasks.kernel.errors import RegistryError
from tasks.kernel.settings import ArtifactStore, platform_address
from tasks.registry.approval import WAITING, Answer, read_question, reopen_question
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import Registry
from tasks.registry.promotion import answer_and_promote, decide_question

MAX_PICTURE_BYTES = 200_000
PICTURE = Path("pictures") / "quality.png"
_SPECIAL = str.maketrans({c: f"&#{ord(c)};" for c in "\\`*_[]|~"})


class OpenQuestion(Contract):
    """A question as it is put to a person; or, where nobody needs to be asked, why not."""

    digest: str
    decision: PromotionDecision
    markdown: str

    @property
    def is_open(self) -> bool:
        """True where a person is to be asked: all gates are open and nobody has answered yet."""
        approval = self.decision.approval
        gates_open = all(gate.passed for gate in self.decision.gates)
        return approval is not None and approval.state == WAITING and gates_open


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
    asked = read_question(registry, registry.version(name, number))
    decision = decide_question(asked, location, store, now)
    if again and not decision.promoted:
        asked = reopen_question(name, number, location, now)
        decision = decide_question(asked, location, store, now)
    text = describe(decision, registry.run_folder(asked.candidate.run_id))
    return OpenQuestion(digest=asked.digest, decision=decision, markdown=text)


def settle(
    name: str,
    number: int,
    digest: str,
    answer: Answer | None,
    location: RegistryLocation,
    store: ArtifactStore,
    now: datetime,
) -> PromotionDecision:
    """Record an answer and decide; without one, report what was settled elsewhere.

    Raises:
        RegistryError: by now another question was put, or nothing was settled.
        TransientError: the registry was busy.
        StorageError: the disk refused; the alias was not moved.
    """
    if answer is not None:
        return answer_and_promote(name, number, answer, location, store, digest)
    registry = Registry(location)
    asked = read_question(registry, registry.version(name, number))
    decision = decide_question(asked, location, store, now)
    if decision.approval is not None and decision.approval.state == WAITING:
        raise RegistryError(
            f"the run that asks about {name} version {number} was resumed as if the question were "
            "settled, and it is not. Nothing was changed; approve or reject it with "
            f"`python -m falaj models approve {name} {number} --approver NAME`"
        )
    return decision


def outcome(decision: PromotionDecision) -> str:
    """What became of a candidate, in a sentence without an end."""
    ref, approval = decision.candidate, decision.approval
    subject = f"{ref.name} version {ref.version}"
    closed = [gate.name for gate in decision.gates if not gate.passed]
    if decision.promoted:
        by = f", approved by {approval.approver}" if approval and approval.approver else ""
        return f"{subject} is the champion{by}"
    if closed:
        return f"{subject} was refused by gate {', '.join(closed)}"
    if approval is None:
        return f"{subject} was not moved"
    until = f"{approval.deadline:%Y-%m-%d %H:%M} UTC"
    return {
        "waiting": f"{subject} waits for a person's approval until {until}",
        "rejected": f"{subject} was rejected by {approval.approver}",
        "timed_out": f"{subject} was rejected: nobody answered before {until}",
        "approved": f"{subject} was approved by {approval.approver} and not moved",
    }[approval.state]


def describe(decision: PromotionDecision, run_folder: Path) -> str:
    """The question in Markdown: what is asked, the picture as a data URL, the gates' table."""
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
    lines += [*_picture(run_folder), "| gate | state | evidence |", "| --- | --- | --- |"]
    lines += [
        f"| {plain(gate.name)} | {'open' if gate.passed else '**CLOSED**'} | "
        f"{plain(gate.evidence)} |"
        for gate in decision.gates
    ]
    return "\n".join(lines) + "\n"


def _picture(run_folder: Path) -> list[str]:
    """The picture that registration drew, where it is there and small enough for a page."""
    file = run_folder / PICTURE
    if not file.is_file() or file.stat().st_size > MAX_PICTURE_BYTES:
        return []
    data = base64.b64encode(file.read_bytes()).decode()
    return [f"![quality](data:image/png;base64,{data})", ""]


def plain(text: object) -> str:
    """Text that neither Markdown nor HTML reads as anything else, on one line."""
    return escape(" ".join(str(text).split()), quote=False).translate(_SPECIAL)


def announcement(
    ref: ModelVersionRef, evaluation: EvaluationReport, commit: str, run_folder: Path, home: Path
) -> str:
    """What was registered, from what, and where to read more.

    Args:
        ref: the version.
        evaluation: its judgement.
        commit: of the code.
        run_folder: folder of the MLflow run's files, with the pictures that were drawn.
        home: the state folder; a platform that runs on it is linked to.
    """
    base = platform_address(home, "mlflow_url")
    page = f"{base}/#/models/{quote(ref.name)}/versions/{ref.version}"
    facts = {
        "MLflow": f"[model version and run]({page}) (asks for the platform's user and password)"
        if base
        else f"run `{plain(ref.run_id)}`",
        "lineage": f"`python -m falaj trace models/{plain(ref.name)}/{ref.version}`",
        "judged on": plain(evaluation.window),
        "program": f"`{plain(ref.program_sha256[:12])}`",
        "training snapshot": f"`{plain(ref.snapshot_sha256[:12])}`",
        "code": f"`{plain(commit[:12])}`",
    }
    lines = [f"## {plain(ref.name)} version {ref.version}", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    return "\n".join([*lines, "", *_picture(run_folder)]) + "\n"
