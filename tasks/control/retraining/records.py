"""Values of the controller: stored drift results, decisions, orders to act, and claims."""

from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import AliasChoices, Field, PositiveInt

from tasks.contracts.base import RESULT_ID, Contract
from tasks.control.config import RetrainingPolicy
from tasks.control.retraining.decision import Action, Cause, Evidence

Mode = Literal["act", "decide_only"]
INCIDENT_ID = AliasChoices("incident_id", "episode_id")
"""Name of fields, and the one that values stored before 2026-11-25 have."""


class Outcome(StrEnum):
    """What a decision came to; the sweep asks again where it is refused for now.

    Attributes:
        ACTS: the action was claimed and is carried out.
        NOTHING_TO_DO: the evidence asks for nothing.
        ALERTS: people are notified; a machine must not act.
        SAME_INCIDENT: refused: this incident has had its run.
        COOL_DOWN: refused for now: too soon after a retraining.
        BUDGET: refused for now: the week's budget is spent.
        APPROVAL: refused for now: a person is asked about a version.
        OUTDATED: refused: a later window was judged before.
        SUPERSEDED: refused: the judged version is no longer the champion.
        DECIDE_ONLY: recorded; acting was not asked for.
    """

    ACTS = "acts"
    NOTHING_TO_DO = "nothing_to_do"
    ALERTS = "alerts"
    SAME_INCIDENT = "same_episode"
    COOL_DOWN = "cool_down"
    BUDGET = "budget"
    APPROVAL = "approval"
    OUTDATED = "outdated"
    SUPERSEDED = "superseded"
    DECIDE_ONLY = "decide_only"


class ClaimState(StrEnum):
    """How far an action has come; only forward."""

    CLAIMED = "claimed"
    STARTED = "started"
    ENDED = "ended"


class StoredResult(Contract):
    """One drift result as the database holds it; the same check gives the same id again."""

    result_id: str = Field(validation_alias=RESULT_ID)
    number: PositiveInt = Field(description="Order in which results of all models were stored.")
    model: str
    use_case: str
    evidence: Evidence
    policy: RetrainingPolicy
    stored_at: datetime
    answered_at: datetime | None


class Order(Contract):
    """An action that was claimed and is to be carried out, once."""

    incident_id: str = Field(
        validation_alias=INCIDENT_ID,
        description="Also the key under which a second start is the same run.",
    )
    model: str
    use_case: str
    action: Action = Field(description="What is carried out.")
    version: PositiveInt = Field(description="Champion that the result judged.")
    result_id: str = Field(validation_alias=RESULT_ID)
    evidence: Evidence
    reason: str


class StartedAction(Contract):
    """What carries an action out."""

    kind: Literal["deployment", "in_process"]
    run_id: str
    place: str = Field(description="Deployment, or host and process, that runs it.")


class RunEnd(Contract):
    """How the run of an action ended."""

    state: str = Field(description="Such as `completed`, `failed`, `crashed`, `cancelled`.")
    seconds: float | None = Field(description="Wall seconds of the run; None where not known.")


class Claim(Contract):
    """The one run of an incident, and how far it has come."""

    order: Order
    state: ClaimState
    started: StartedAction | None
    end: RunEnd | None


class Decision(Contract):
    """One decision or refusal, as the record keeps it."""

    number: PositiveInt
    decided_at: datetime
    model: str
    use_case: str
    version: PositiveInt
    result_id: str = Field(validation_alias=RESULT_ID)
    incident_id: str | None = Field(validation_alias=INCIDENT_ID)
    cause: Cause | None
    action: Action = Field(description="What the rule chose.")
    carried_out_as: Action | None = Field(description="What was claimed; None where nothing was.")
    rule: int
    outcome: Outcome
    reason: str
    actor: str = Field(description="Who asked: a flow run, the sweep, a person.")
    run_id: str | None = Field(description="Run of the incident's action, once it was started.")
    run_state: str | None = Field(description="`claimed`, `started`, or how the run ended.")
    evidence: Evidence


class Answer(Contract):
    """What an answer added to the record, and what is now to be carried out."""

    decisions: tuple[Decision, ...]
    orders: tuple[Order, ...] = Field(description="Claimed and not yet started.")
