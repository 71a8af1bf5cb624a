"""Answering verdicts: each once, in their order, with one run for each episode of trouble.

An episode is of one model, use case and cause. The first bad verdict opens it; a verdict that shows
the cause gone, or another champion, closes it. The events that ask for answers may be lost,
doubled, late or in any order: whoever is asked answers all verdicts that have none, in the order in
which they were stored, under one lock and in one transaction. So nothing depends on who is asked,
when, or how often.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from tasks.control.retraining.book import Book, Episode, governing
from tasks.control.retraining.budget import Refusal, carried_out_as, why_not_now
from tasks.control.retraining.decision import Action, Cause, Choice, decide, healed
from tasks.control.retraining.ledger import Ledger
from tasks.control.retraining.records import Answer, ClaimState, Mode, Order, Outcome, StoredVerdict

logger = logging.getLogger(__name__)

PLAYED_AGAIN = timedelta(days=180)
"""A window so far before the latest is not late: recorded data is played from its start again."""


@dataclass(frozen=True)
class _Here:
    """What the one who asks knows of the platform and the registry; see `answer`."""

    champion: int | None
    recalibrates: bool
    asked_about: int | None


def answer(
    ledger: Ledger,
    verdict_id: str,
    champion: int | None,
    actor: str,
    mode: Mode = "act",
    *,
    recalibrates: bool = True,
    asked_about: int | None = None,
) -> Answer:
    """Answer a verdict, and all of its model and use case that have no answer yet.

    Args:
        ledger: the record.
        verdict_id: verdict that an event named.
        champion: version that is the champion now; None where that is not known.
        actor: who asks, for the record.
        mode: `decide_only` writes decisions, and neither opens nor closes nor claims anything.
        recalibrates: something here carries out a recalibration; else it becomes a retraining.
        asked_about: version whose promotion waits for a person's answer; nothing is trained before.

    Returns:
        The new rows, or the one that answered the verdict before; and what is to be carried out.

    Raises:
        DataContractError: there is no such verdict.
        TransientError: the database does not answer, or was busy.
    """
    verdict = ledger.verdict(verdict_id)
    if verdict.answered_at is None:
        model, use_case = verdict.model, verdict.use_case
        made = settle(
            ledger,
            model,
            use_case,
            champion,
            actor,
            mode,
            recalibrates=recalibrates,
            asked_about=asked_about,
        )
        if any(decision.verdict_id == verdict_id for decision in made.decisions):
            return made
    ledger.count_asked(verdict_id)  # somebody has answered it, just now or long ago
    known = ledger.numbered([], verdict_id)
    return Answer(decisions=tuple(known), orders=_orders(ledger, verdict.model, mode))


def settle(
    ledger: Ledger,
    model: str,
    use_case: str,
    champion: int | None,
    actor: str,
    mode: Mode = "act",
    *,
    recalibrates: bool = True,
    asked_about: int | None = None,
) -> Answer:
    """Answer all verdicts of a model and use case, then look again at trouble that had to wait."""
    here = _Here(champion, recalibrates, asked_about)
    with governing(ledger.engine, model, use_case, actor) as book:
        if mode == "decide_only":
            numbers = [_advise(book, verdict) for verdict in book.unanswered()]
        else:
            _close_for_promotion(book, champion)
            numbers = [_answer_one(book, verdict, here) for verdict in book.unanswered()]
            numbers += _review(book, here)
    decisions = ledger.numbered(numbers)
    for made in decisions:
        logger.info("%s: %s, %s: %s", model, made.action, made.outcome, made.reason)
    return Answer(decisions=tuple(decisions), orders=_orders(ledger, model, mode))


def _orders(ledger: Ledger, model: str, mode: Mode) -> tuple[Order, ...]:
    if mode == "decide_only":
        return ()
    return tuple(claim.order for claim in ledger.claims(ClaimState.CLAIMED, model))


def _advise(book: Book, verdict: StoredVerdict) -> int:
    choice = decide(verdict.evidence, verdict.policy)
    book.mark_answered(verdict.verdict_id)
    outcome = Outcome.NOTHING_TO_DO if choice.cause is None else Outcome.DECIDE_ONLY
    return book.write(verdict.verdict_id, choice, outcome, choice.reason)


def _close_for_promotion(book: Book, champion: int | None) -> None:
    for episode in book.open_episodes():
        if champion is not None and episode.version != champion:
            book.close(episode, f"version {champion} became the champion")


def _answer_one(book: Book, verdict: StoredVerdict, here: _Here) -> int:
    choice = decide(verdict.evidence, verdict.policy)
    latest = book.latest_window_end()
    book.mark_answered(verdict.verdict_id)
    version = verdict.evidence.version
    if here.champion is not None and version != here.champion:
        reason = f"version {version} was judged, version {here.champion} is the champion by now"
        return book.write(verdict.verdict_id, choice, Outcome.SUPERSEDED, reason)
    end = verdict.evidence.window.end
    if latest is not None and end < latest < end + PLAYED_AGAIN:
        reason = f"{verdict.evidence.window} lies before {latest:%Y-%m-%dT%H:%MZ}, judged before"
        return book.write(verdict.verdict_id, choice, Outcome.OUTDATED, reason)
    _close_for_promotion(book, version)
    for episode in book.open_episodes():
        if episode.cause in healed(verdict.evidence, choice):
            book.close(episode, f"verdict {verdict.verdict_id}")
    if choice.cause is None:
        return book.write(verdict.verdict_id, choice, Outcome.NOTHING_TO_DO, choice.reason)
    return _answer_trouble(book, verdict, choice, choice.cause, here)


def _answer_trouble(
    book: Book, verdict: StoredVerdict, choice: Choice, cause: Cause, here: _Here
) -> int:
    episode = book.episode(verdict, cause)
    if episode.recalibrated and here.asked_about is None:
        # Had it helped, another version were the champion: what follows is another episode.
        book.close(episode, f"its recalibration did not help: verdict {verdict.verdict_id}")
        episode = book.episode(verdict, cause)
    if choice.action is Action.NOTHING:
        return book.write(verdict.verdict_id, choice, Outcome.ALERTS, choice.reason, episode)
    if episode.is_claimed:
        reason = f"episode {episode.episode_id[:12]} has had its run; {choice.reason}"
        return book.write(verdict.verdict_id, choice, Outcome.SAME_EPISODE, reason, episode)
    return _act(book, verdict, choice, episode, here)


def _act(book: Book, verdict: StoredVerdict, choice: Choice, episode: Episode, here: _Here) -> int:
    action, instead, refusal = _weigh(book, verdict, choice, here)
    if refusal is not None:
        reason = f"{refusal.reason}; {choice.reason}"
        return book.write(verdict.verdict_id, choice, refusal.outcome, reason, episode)
    book.claim(episode, action, verdict.verdict_id, choice.reason)
    reason = choice.reason
    if instead is not None:
        reason += f"; carried out as {action}: {instead}"
    return book.write(verdict.verdict_id, choice, Outcome.ACTS, reason, episode, action)


def _weigh(
    book: Book, verdict: StoredVerdict, choice: Choice, here: _Here
) -> tuple[Action, str | None, Refusal | None]:
    """What would be done, why it is not what was chosen, and why it has to wait."""
    spent = book.spent()
    action, instead = carried_out_as(
        choice.action,
        verdict.evidence.version,
        book.now,
        spent,
        verdict.policy,
        recalibrates=here.recalibrates,
    )
    refusal = why_not_now(action, book.now, spent, verdict.policy, here.asked_about)
    return action, instead, refusal


def _review(book: Book, here: _Here) -> Iterator[int]:
    """Ask again for trouble that had to wait; a refusal that is like the last one adds no row."""
    for episode in book.open_episodes():
        if episode.is_claimed or episode.cause is Cause.FEED:
            continue
        verdict = book.verdict(episode.newest)
        choice = decide(verdict.evidence, verdict.policy)
        if choice.action is Action.NOTHING:
            continue
        refusal = _weigh(book, verdict, choice, here)[2]
        if refusal is None or refusal.outcome is not book.last_outcome(episode):
            yield _act(book, verdict, choice, episode, here)
