"""Promote: check every gate, ask a person where the use case wants it, move the champion.

A question is closed in time: by an answer, or by a run at its deadline.
"""

import time
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import UUID

from prefect import flow, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import StateType
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.logging import get_run_logger
from prefect.states import Cancelled
from pydantic import Field, PositiveInt, ValidationError

from flows.candidate import validated_rows
from flows.config import PipelineConfig
from flows.decision import start_run
from flows.stages import FOUND, RECORDED, called, found_but_not_retried
from tasks.contracts.base import ModelVersionRef
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.evaluation import EvaluationReport
from tasks.contracts.release import ModelVariant, PromotionDecision
from tasks.features.task import record_act
from tasks.governance.duties import check_approver
from tasks.governance.identity import Subject, read_sign_in
from tasks.governance.journal import Journal
from tasks.kernel.errors import AccessError, ConfigurationError, RegistryError
from tasks.kernel.settings import Settings
from tasks.registry import task as registry
from tasks.registry.approval import VISIBLE, Answer, outcome, seconds_left
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import TRAINED_BY_TAG, Registry
from tasks.registry.promotion import OpenQuestion

APPROVAL = "approval/approval"
EXPIRY = "approval-expiry/approval-expiry"
ACTION = "answer-promotion"
SETTLED = "settled elsewhere"
"""Approver that a run is resumed with when the answer was given without it."""

SETTLE_S = 8.0
"""Seconds from a run's start to its suspension: a heartbeat that reached the server after the
suspension would make a watch of missing heartbeats take the run for dead."""

SUSPENDED_WITHIN_S = 300.0
"""Seconds for which the end of a question waits for the run that asks to be suspended."""

SPARE_S = 14 * 86_400
"""Seconds after the deadline at which Prefect itself gives a run up that nobody closed."""


@flow(name="promotion", flow_run_name="promote-{candidate.name}-v{candidate.version}", **RECORDED)
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
    decision = registry.promote_candidate(
        candidate, evaluation, dataset, variants, config.promotion
    )
    announce_refusal(decision)
    start_approval(decision)
    return decision


@flow(
    name="version-promotion",
    flow_run_name="promote-{config.registry.model_name}-v{version}",
    **RECORDED,
)
def version_promotion_flow(
    version: PositiveInt, config: PipelineConfig, only_judge: bool = False
) -> PromotionDecision:
    """Decide on a version that is registered already, on the judgement that is filed with it.

    Its rows are those of its own training: the snapshot is taken from the store, or built again
    where it is gone.

    Args:
        version: Its number.
        config: The use case, with the gates' bounds.
        only_judge: Ask the gates, and change nothing.

    Raises:
        RegistryError: there is no such version, or it lacks its judgement or its variants.
    """
    filed = registry.find_filed(config.registry, version)
    if filed.splits != config.splits:
        config = config.with_splits(filed.splits)
    evidence = filed.version, filed.evaluation, validated_rows(config), filed.variants
    if only_judge:
        return registry.promote_candidate(*evidence, config.promotion, only_judge=True)
    return called(promotion_flow, *evidence, config)


def announce_refusal(decision: PromotionDecision) -> None:
    """Emit the event of a refusal, where a gate is closed."""
    closed = [gate for gate in decision.gates if not gate.passed]
    ref, before = decision.candidate, decision.previous_champion
    if not closed or before == ref.version:
        return
    gates = [{"gate": gate.name, "evidence": gate.evidence} for gate in closed]
    _announce("promotion.refused", _subject_values(decision), champion=before, closed=gates)


class ApprovalForm(RunInput):
    """May this candidate become the champion?"""

    decision: Literal["approve", "reject"] = Field(
        description="approve: it becomes the champion if all gates are still open. reject: it "
        "stays a candidate, and nobody is asked about this version again."
    )
    approver: str = Field(
        min_length=1,
        max_length=200,
        pattern=VISIBLE,
        description="Your name, as it is to be recorded with the version and in the audit trail. "
        "Where you are signed in, that name is taken instead.",
    )
    comment: str = Field(
        default="", max_length=2000, description="Why, for those who read it later; may be empty."
    )


@flow(
    name="approval",
    flow_run_name="approve-{model}-v{version}",
    **found_but_not_retried("its question is in the registry, and can be answered without it"),
)
def approval_flow(model: str, version: int, ask_again: bool = False) -> PromotionDecision:
    """Ask a person about a candidate and promote it if the answer is yes and all gates agree.

    Args:
        model: Registered model.
        version: Its version; a promotion must have found all gates open for it.
        ask_again: Ask also where this version was rejected before, or where nobody answered in
            time.
    """
    asked = registry.open_promotion_question(model, version, ask_again)
    if not asked.is_open:
        get_run_logger().info("nobody is asked: %s", outcome(asked.decision))
        return asked.decision
    answer = ask_a_person(asked)
    if answer is not None:
        record_act(ACTION, answer.decision, _subject(model, version), answer.approver)
    decision = registry.answer_promotion_question(model, version, asked.digest, answer)
    announce_answer(decision)
    call_off_expiry()
    return decision


@flow(name="approval-expiry", flow_run_name="close-{model}-v{version}", **FOUND)
def approval_expiry_flow(model: str, version: int, question: str, waiting_run: UUID) -> bool:
    """Reject a candidate if its question is still open; true where it is closed by this.

    Started by the run that asks, for the moment at which the time is over. That run may not be
    suspended yet by then, or may have become so just after somebody answered elsewhere: it is let
    go on in either case.

    Args:
        model: Registered model.
        version: Its version.
        question: Digest of the question.
        waiting_run: The run that asks; it goes on and reports the rejection.
    """
    closed = registry.close_promotion_question(model, version, question)
    if closed:
        record_act(ACTION, "timed out", _subject(model, version), None)
    if not _is_open(model, version, question):
        with get_client(sync_client=True) as client:
            wait_until_suspended(client, waiting_run)
            release(client, waiting_run)
    return closed


def ask_a_person(asked: OpenQuestion) -> Answer | None:
    """Suspend this run until somebody answers; None where the question was settled elsewhere.

    Called again when the run goes on, it returns the answer at once.

    Raises:
        ConfigurationError: the run has no deployment, so Prefect cannot suspend it.
        RegistryError: the run was set going without an answer; nothing was approved.
    """
    ref, approval = asked.decision.candidate, asked.decision.approval
    assert approval is not None
    if runtime.deployment.id is None:
        raise ConfigurationError(
            f"this run was started without a deployment, so it cannot wait for an answer about "
            f"{ref.name} version {ref.version}. Start {APPROVAL}, or run `falaj models "
            f"approve {ref.name} {ref.version} --approver NAME`"
        )
    if not _was_suspended():
        _before_waiting(asked)
        if not _is_open(ref.name, ref.version, asked.digest):
            return None
    left_s = (approval.deadline - datetime.now(UTC)).total_seconds()
    form = ApprovalForm.with_initial_data(description=asked.markdown)
    try:
        told = suspend_flow_run(wait_for_input=form, timeout=int(max(left_s, 0) + SPARE_S))
    except ValidationError as exc:
        raise RegistryError(
            f"the run was set going without an answer about {ref.name} version {ref.version}; "
            f"nothing was approved. Start {APPROVAL} again, or run `falaj models approve "
            f"{ref.name} {ref.version} --approver NAME`"
        ) from exc
    if told.approver == SETTLED:
        return None
    answer = Answer(**told.model_dump(), given=_moment_of_answer())
    return signed_in_answer(answer, ref, Settings.from_environment())


def signed_in_answer(answer: Answer, ref: ModelVersionRef, settings: Settings) -> Answer:
    """The answer under the name of who was signed in when it was given, whatever was typed.

    The authorizer wrote who resumed this run, before Prefect knew of it.

    Raises:
        AccessError: nobody who is signed in gave it, or who trained the version approves it.
    """
    if read_sign_in(settings.home) is None:
        return answer
    run, approver = str(runtime.flow_run.id), None
    for line in Journal(settings.home / "audit").lines():
        said = line.content
        given = (said.get("action"), said.get("flow_run"), said.get("said"))
        if given == ("approve", run, answer.decision):
            if datetime.fromisoformat(said["time"]) <= answer.given:
                approver = str(said["who"]["subject"])
    if approver is None:
        raise AccessError(
            f"nobody who is signed in answered about {ref.name} version {ref.version}: the run was "
            f"set going past the gateway. Nothing was approved; start {APPROVAL} again, or run "
            f"`falaj models approve {ref.name} {ref.version}`"
        )
    if answer.decision == "approve":
        version = Registry(RegistryLocation.of(settings)).version(ref.name, ref.version)
        subject = Subject(approver, "", (), ())
        check_approver(subject, version.tags.get(TRAINED_BY_TAG), str(version))
    return answer.model_copy(update={"approver": approver})


def announce_broken_glass(model: str, version: int, by: str, reason: str) -> None:
    """Emit the event of an admin who did what the duties forbid."""
    _announce("access.break-glass", {"model": model, "version": version}, by=by, reason=reason)


def _was_suspended() -> bool:
    """True where this run waited already; a run that is resumed does not count as a further one."""
    with get_client(sync_client=True) as client:
        policy = client.read_flow_run(UUID(str(runtime.flow_run.id))).empirical_policy
    return bool(policy.pause_keys)


def _before_waiting(asked: OpenQuestion) -> None:
    decision, approval = asked.decision, asked.decision.approval
    assert approval is not None
    question = {"question": asked.digest, "waiting_run": str(runtime.flow_run.id)}
    started, version = time.monotonic(), _subject_values(decision)
    start_run(EXPIRY, version | question, key=_expiry_key(), scheduled_time=approval.deadline)
    summary = f"{len(decision.gates)} of {len(decision.gates)} gates are open."
    deadline = f"{approval.deadline:%Y-%m-%d %H:%M} UTC"
    _announce("promotion.waiting", version, summary=summary, deadline=deadline)
    time.sleep(max(0.0, SETTLE_S - (time.monotonic() - started)))


def announce_answer(decision: PromotionDecision) -> None:
    """Emit the event of a rejection, by a person or because the time was over."""
    approval = decision.approval
    get_run_logger().info("%s", outcome(decision))
    if approval is not None and approval.state in ("rejected", "timed_out"):
        said = {"approver": approval.approver, "comment": approval.comment}
        about = _subject_values(decision) | {"champion": decision.previous_champion}
        _announce("promotion.rejected", about, **said, reason=approval.state)


def call_off_expiry() -> None:
    """Cancel the run that would close the question of this one, where it has not begun."""
    own = FlowRunFilter.model_validate({"idempotency_key": {"any_": [_expiry_key()]}})
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(flow_run_filter=own):
            if run.state is not None and run.state.is_scheduled():
                client.set_flow_run_state(run.id, Cancelled(message="The question is settled."))


def start_approval(decision: PromotionDecision) -> None:
    """Start the run that asks about a candidate that waits; once for a question.

    Where the Prefect API has no such deployment, no platform runs: the candidate waits, and the
    log says how to answer.
    """
    approval, ref = decision.approval, decision.candidate
    if approval is None or approval.state != "waiting":
        return
    key = f"{APPROVAL}:{ref.name}:{ref.version}:{approval.asked.isoformat()}"
    try:
        run = start_run(APPROVAL, _subject_values(decision), key=key)
    except ObjectNotFound:
        get_run_logger().warning("%s", how_to_answer(decision))
    else:
        get_run_logger().info("run %s asks a person", run.name)


def promotion_outcome(decision: PromotionDecision) -> str:
    """What became of a candidate; where it waits and nobody can ask, also how to answer."""
    waits = decision.approval is not None and decision.approval.state == "waiting"
    return how_to_answer(decision) if waits else outcome(decision)


def how_to_answer(decision: PromotionDecision) -> str:
    """A sentence for the person who is to decide, where no run asks."""
    ref = decision.candidate
    return (
        f"{outcome(decision)}; answer with `falaj models approve {ref.name} "
        f"{ref.version} --approver NAME`, or `reject`. The gates are asked once more then"
    )


def settle_waiting_runs(model: str, version: int) -> int:
    """Let the runs go on that ask about a version which was answered elsewhere; returns how many.

    Raises:
        RegistryError: a run refused to go on.
    """
    suspended = {"state": {"type": {"any_": [StateType.PAUSED]}}}
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(
            flow_filter=FlowFilter.model_validate({"name": {"any_": [approval_flow.name]}}),
            flow_run_filter=FlowRunFilter.model_validate(suspended),
        )
        about = {"model": model, "version": version}
        waiting = [r.id for r in runs if about.items() <= r.parameters.items()]
        for run_id in waiting:
            release(client, run_id)
    return len(waiting)


def release(client: SyncPrefectClient, run_id: UUID) -> None:
    """Let a suspended run go on without a person's answer; one that cannot is cancelled."""
    run = client.read_flow_run(run_id)
    if run.state is None or not run.state.is_paused():
        return
    resumed = client.resume_flow_run(run_id, run_input={"decision": "reject", "approver": SETTLED})
    if resumed.status.value != "ACCEPT":  # it was killed before its form was stored
        client.set_flow_run_state(run_id, Cancelled(message="The question was settled elsewhere."))


def wait_until_suspended(client: SyncPrefectClient, run_id: UUID) -> None:
    """Wait until a run that is about to ask is suspended, or has ended; else say that it is not."""
    deadline = time.monotonic() + SUSPENDED_WITHIN_S
    while time.monotonic() < deadline:
        state = client.read_flow_run(run_id).state
        if state is not None and (state.is_paused() or state.is_final()):
            return
        time.sleep(1.0)
    get_run_logger().warning(
        "run %s is neither suspended nor ended after %.0f s; it sees that its question is settled "
        "when a worker goes on with it",
        run_id,
        SUSPENDED_WITHIN_S,
    )


def _announce(what: str, version: dict[str, Any], **facts: Any) -> None:
    """Emit an event about a model's version; its resource is the model."""
    model = version["model"]
    labels = {"prefect.resource.id": f"falaj.model.{model}", "prefect.resource.name": model}
    emit_event(f"falaj.{what}", resource=labels, payload=version | facts)


def _moment_of_answer() -> datetime:
    """When the run was resumed: it may have waited for a worker since."""
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(UUID(str(runtime.flow_run.id)))
    resumed = [state.timestamp for state in states if state.name == "Resuming"]
    return max(resumed, default=datetime.now(UTC))


def _is_open(model: str, version: int, question: str) -> bool:
    location = RegistryLocation.of(Settings.from_environment())
    return seconds_left(model, version, location, datetime.now(UTC), question) is not None


def _expiry_key() -> str:
    return f"{EXPIRY}:{runtime.flow_run.id}"


def _subject(model: str, version: int) -> dict[str, str]:
    return {"model": model, "version": f"version {version}"}


def _subject_values(decision: PromotionDecision) -> dict[str, Any]:
    return {"model": decision.candidate.name, "version": decision.candidate.version}
