"""Answering results: each once, in their order, with one run for each incident of trouble.

Then carrying out: each claimed action is started once, and how its run ended is noted.

An incident is of one model, use case and cause. The first bad result opens it; a result that
shows the cause gone, or another champion, closes it. The events that ask for answers may be lost,
doubled, late or in any order: whoever is asked answers all results that have none, in the order in
which they were stored, under one lock and in one transaction. So nothing depends on who is asked,
when, or how often.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from tasks.control.retraining.budget import KINDS, Refusal, carried_out_as, why_not_now
from tasks.control.retraining.decision import Action, Cause, Choice, decide, healed
from tasks.control.retraining.ledger import Incident, Incidents, Ledger
from tasks.control.retraining.records import (
    Answer,
    ClaimState,
    Mode,
    Order,
    Outcome,
    RunEnd,
    StartedAction,
    StoredResult,
)
from tasks.kernel.errors import FalajError

logger = logging.getLogger(__name__)

LOST = "lost"
"""State of a run whose process is gone, and that nobody else will bring to an end."""
PLAYED_AGAIN = timedelta(days=180)
"""A window so far before the latest is not late: recorded data is played from its start again."""


@dataclass(frozen=True)
class Here:
    """What the one who asks knows of the platform and the registry."""

    champion: int | None
    """Version that is the champion now; None where that is not known."""
    recalibrates: bool = True
    """Something here carries out a recalibration; else it becomes a retraining."""
    asked_about: int | None = None
    """Version whose promotion waits for a person's answer; nothing is trained before."""
    mode: Mode = "act"
    """`decide_only` writes decisions, and neither opens nor closes nor claims anything."""


def answer(ledger: Ledger, result_id: str, actor: str, here: Here) -> Answer:
    """Answer a drift result, and all of its model and use case that have no answer yet.

    Args:
        ledger: the record.
        result_id: result that an event named.
        actor: who asks, for the record.
        here: what is known there.

    Returns:
        The new rows, or the one that answered the result before; and what is to be carried out.

    Raises:
        DataContractError: there is no such result.
        TransientError: the database does not answer, or was busy.
    """
    result = ledger.result(result_id)
    if result.answered_at is None:
        made = settle(ledger, result.model, result.use_case, actor, here)
        if any(decision.result_id == result_id for decision in made.decisions):
            return made
    known = ledger.numbered([], result_id)  # somebody has answered it, just now or long ago
    return Answer(decisions=tuple(known), orders=_orders(ledger, result.model, here))


def settle(ledger: Ledger, model: str, use_case: str, actor: str, here: Here) -> Answer:
    """Answer all drift results of a model and use case, then trouble that had to wait."""
    with ledger.deciding(model, use_case, actor) as incidents:
        if here.mode == "decide_only":
            numbers = [_advise(incidents, result) for result in incidents.unanswered()]
        else:
            _close_for_promotion(incidents, here.champion)
            numbers = [_answer_one(incidents, each, here) for each in incidents.unanswered()]
            numbers += _review(incidents, here)
    decisions = ledger.numbered(numbers)
    for made in decisions:
        logger.info("%s: %s, %s: %s", model, made.action, made.outcome, made.reason)
    return Answer(decisions=tuple(decisions), orders=_orders(ledger, model, here))


def _orders(ledger: Ledger, model: str, here: Here) -> tuple[Order, ...]:
    if here.mode == "decide_only":
        return ()
    return tuple(claim.order for claim in ledger.claims(ClaimState.CLAIMED, model))


def _advise(incidents: Incidents, result: StoredResult) -> int:
    choice = decide(result.evidence, result.policy)
    incidents.mark_answered(result.result_id)
    outcome = Outcome.NOTHING_TO_DO if choice.cause is None else Outcome.DECIDE_ONLY
    return incidents.write(result.result_id, choice, outcome, choice.reason)


def _close_for_promotion(incidents: Incidents, champion: int | None) -> None:
    for incident in incidents.open_ones():
        if champion is not None and incident.version != champion:
            incidents.close(incident, f"version {champion} became the champion")


def _answer_one(incidents: Incidents, result: StoredResult, here: Here) -> int:
    choice = decide(result.evidence, result.policy)
    latest = incidents.latest_window_end()
    incidents.mark_answered(result.result_id)
    version = result.evidence.version
    if here.champion is not None and version != here.champion:
        reason = f"version {version} was judged, version {here.champion} is the champion by now"
        return incidents.write(result.result_id, choice, Outcome.SUPERSEDED, reason)
    end = result.evidence.window.end
    if latest is not None and end < latest < end + PLAYED_AGAIN:
        reason = f"{result.evidence.window} lies before {latest:%Y-%m-%dT%H:%MZ}, judged before"
        return incidents.write(result.result_id, choice, Outcome.OUTDATED, reason)
    _close_for_promotion(incidents, version)
    for incident in incidents.open_ones():
        if incident.cause in healed(result.evidence, choice):
            incidents.close(incident, f"result {result.result_id}")
    if choice.cause is None:
        return incidents.write(result.result_id, choice, Outcome.NOTHING_TO_DO, choice.reason)
    return _answer_trouble(incidents, result, choice, choice.cause, here)


def _answer_trouble(
    incidents: Incidents, result: StoredResult, choice: Choice, cause: Cause, here: Here
) -> int:
    incident = incidents.of(result, cause)
    if (did := _did_not_help(incidents, incident, result)) and here.asked_about is None:
        # Had it helped, another version were the champion: what follows is another incident.
        incidents.close(incident, f"its {did} did not help: result {result.result_id}")
        incident = incidents.of(result, cause)
    if choice.action is Action.NOTHING:
        return incidents.write(result.result_id, choice, Outcome.ALERTS, choice.reason, incident)
    if incident.is_claimed:
        reason = f"incident {incident.incident_id[:12]} has had its run; {choice.reason}"
        return incidents.write(result.result_id, choice, Outcome.SAME_INCIDENT, reason, incident)
    return _act(incidents, result, choice, incident, here)


def _did_not_help(incidents: Incidents, incident: Incident, result: StoredResult) -> str | None:
    """What has ended and left the trouble; a retraining alone is given time for newer rows.

    One for more days is repeated once a whole window of the check is new.
    """
    if incident.recalibrated:
        return KINDS[Action.RECALIBRATE]
    again, window = timedelta(days=result.policy.retrain_again_days), result.evidence.window
    if incident.cause is Cause.GROWTH:
        again = window.end - window.start
    if incident.retrained_at is not None and incidents.now - incident.retrained_at >= again:
        return KINDS[Action.RETRAIN]
    return None


def _act(
    incidents: Incidents, result: StoredResult, choice: Choice, incident: Incident, here: Here
) -> int:
    action, instead, refusal = _weigh(incidents, result, choice, here)
    if refusal is not None:
        reason = f"{refusal.reason}; {choice.reason}"
        return incidents.write(result.result_id, choice, refusal.outcome, reason, incident)
    incidents.claim(incident, action, result.result_id, choice.reason)
    reason = choice.reason
    if instead is not None:
        reason += f"; carried out as {action}: {instead}"
    return incidents.write(result.result_id, choice, Outcome.ACTS, reason, incident, action)


def _weigh(
    incidents: Incidents, result: StoredResult, choice: Choice, here: Here
) -> tuple[Action, str | None, Refusal | None]:
    """What would be done, why it is not what was chosen, and why it has to wait."""
    spent = incidents.spent()
    action, instead = carried_out_as(
        choice.action,
        result.evidence.version,
        incidents.now,
        spent,
        result.policy,
        recalibrates=here.recalibrates,
    )
    refusal = why_not_now(action, incidents.now, spent, result.policy, here.asked_about)
    return action, instead, refusal


def _review(incidents: Incidents, here: Here) -> Iterator[int]:
    """Ask again for trouble that had to wait; a refusal that is like the last one adds no row."""
    for incident in incidents.open_ones():
        if incident.is_claimed or incident.cause is Cause.FEED:
            continue
        result = incidents.result(incident.newest)
        choice = decide(result.evidence, result.policy)
        if choice.action is Action.NOTHING:
            continue
        refusal = _weigh(incidents, result, choice, here)[2]
        if refusal is None or refusal.outcome is not incidents.last_outcome(incident):
            yield _act(incidents, result, choice, incident, here)


def start_claimed(
    ledger: Ledger, orders: Sequence[Order], start: Callable[[Order], StartedAction | None]
) -> list[StartedAction]:
    """Start what was claimed; what failed to start stays claimed and is tried again later.

        claimed -> reserved (platform) -> started (run id) -> ended (state, seconds)

    A process killed between two of these leaves the earlier one in the table, and the sweep goes on
    from there. Starting again is safe on one platform: the incident is the key under which it gives
    the same run. Another platform on the same database knows nothing of that key, so whoever starts
    a run reserves its claim first.

    Args:
        ledger: the record.
        orders: what was claimed.
        start: starts one and returns at once; the same order again gives the same run. None where
            another platform, or another process, has taken it.

    Raises:
        FalajError: the first start that failed, after all others were tried.
    """
    started, failures = [], list[FalajError]()
    for order in orders:
        try:
            run = start(order)
        except FalajError as exc:
            logger.warning("%s of %s could not be started: %s", order.action, order.model, exc)
            failures.append(exc)
            continue
        if run is None:
            logger.info("%s of %s is started elsewhere", order.action, order.model)
            continue
        ledger.mark_started(order.incident_id, run)
        logger.info("%s of %s runs as %s in %s", order.action, order.model, run.run_id, run.place)
        started.append(run)
    if failures:
        raise failures[0]
    return started


def note_ends(ledger: Ledger, end_of: Callable[[Order, StartedAction], RunEnd | None]) -> int:
    """Note the end of each started run that has ended; returns how many that were.

    One that is lost is claimed anew: finished stages are kept, so it goes on where it was.

    Args:
        ledger: the record.
        end_of: how a run ended; None while it runs, `LOST` where it is to be taken up again.
    """
    num_ended = 0
    for claim in ledger.claims(ClaimState.STARTED):
        if claim.started is None:
            continue
        incident, run = claim.order.incident_id, claim.started.run_id
        end = end_of(claim.order, claim.started)
        if end is not None and end.state == LOST:
            ledger.take_up(incident, run)
            logger.warning("the process of run %s is gone; taken up again", run)
        elif end is not None and ledger.mark_ended(incident, end):
            num_ended += 1
            logger.info("run %s of %s: %s", run, claim.order.model, end.state)
    return num_ended
