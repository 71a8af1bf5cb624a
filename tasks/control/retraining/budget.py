"""May the controller act now? A person who is asked already, a cool-down, budgets."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tasks.control.config import RetrainingPolicy
from tasks.control.retraining.decision import Action
from tasks.control.retraining.records import Outcome

WEEK, MONTH = timedelta(days=7), timedelta(days=30)
STILL_RUNS = timedelta(days=2)
RECALIBRATE_AGAIN = timedelta(days=14)
"""Scores that are wrong again so soon after a recalibration ask for a retraining."""


KINDS = {Action.RETRAIN: "retraining", Action.RECALIBRATE: "recalibration"}


@dataclass(frozen=True)
class Spent:
    """One earlier retraining or recalibration of the model."""

    claimed_at: datetime
    seconds: float | None
    """Wall seconds of its run; None while they are not known."""
    action: Action = Action.RETRAIN
    version: int | None = None
    """Version that was judged; None where that does not matter."""
    has_ended: bool = False
    amount: float | None = None
    """Money of its run so far, by the ledger of costs; None while nothing is known of it."""


@dataclass(frozen=True)
class Refusal:
    """Why an action has to wait."""

    outcome: Outcome
    reason: str


def carried_out_as(
    action: Action,
    version: int,
    now: datetime,
    spent: Sequence[Spent],
    config: RetrainingPolicy,
    *,
    recalibrates: bool,
) -> tuple[Action, str | None]:
    """What is done where the rule chose `action`, and why it is something else.

    A recalibration becomes a retraining where it is not allowed, nothing here carries it out, or an
    earlier one did not help: it has ended and the version that it was for is the champion still, or
    scores are wrong again within `RECALIBRATE_AGAIN`.

    Args:
        action: what the rule chose.
        version: champion that was judged.
        now: the database's time.
        spent: retrainings and recalibrations of the model that were claimed before.
        config: the bounds.
        recalibrates: something here carries out a recalibration.
    """
    if action is not Action.RECALIBRATE:
        return action, None
    if not config.max_recalibrations_per_week:
        return Action.RETRAIN, "recalibrating is switched off (max_recalibrations_per_week is 0)"
    if not recalibrates:
        return Action.RETRAIN, "no deployment of the flow recalibration has this use case"
    for earlier in reversed(spent):
        if earlier.action is not Action.RECALIBRATE or not earlier.has_ended:
            continue
        when = f"the recalibration claimed at {earlier.claimed_at:%Y-%m-%d %H:%M}Z"
        if earlier.version == version:
            return Action.RETRAIN, f"{when} has ended, and version {version} is the champion still"
        if now - earlier.claimed_at < RECALIBRATE_AGAIN:
            return Action.RETRAIN, (
                f"{when} did not last: scores are wrong again within {RECALIBRATE_AGAIN.days} days"
            )
    return action, None


def why_not_now(
    action: Action,
    now: datetime,
    spent: Sequence[Spent],
    config: RetrainingPolicy,
    asked_about: int | None = None,
) -> Refusal | None:
    """The first bound that an action would break; None where it may be done.

    Rolling back trains nothing and ends harm, so no bound but "once an incident" holds it. A
    recalibration waits for the cool-down of both kinds, a retraining only for that of its own: it
    may follow a recalibration that did not help. Each kind has its own number of runs a week, and
    the hours and the money of both count.

    Args:
        action: what is to be done.
        now: the database's time; no moment in `spent` is later.
        spent: retrainings and recalibrations of the model that were claimed before.
        config: the bounds.
        asked_about: version whose promotion waits for a person: it may be the cure.
    """
    if action not in KINDS:
        return None
    if asked_about is not None:
        reason = f"version {asked_about} waits for a person's approval, and may be the cure"
        return Refusal(Outcome.APPROVAL, reason)
    cool_down = timedelta(hours=config.cool_down_hours)
    held_by = [s for s in spent if action is Action.RECALIBRATE or s.action is action]
    latest = max(held_by, key=lambda s: s.claimed_at, default=None)
    if latest is not None and now - latest.claimed_at < cool_down:
        free = latest.claimed_at + cool_down
        return Refusal(
            Outcome.COOL_DOWN,
            f"cool-down of {config.cool_down_hours:g} h since the {KINDS[latest.action]} claimed "
            f"at {latest.claimed_at:%Y-%m-%d %H:%M}Z; free at {free:%Y-%m-%d %H:%M}Z",
        )
    return _over_budget(
        action, [s for s in spent if now - s.claimed_at < WEEK], config
    ) or _over_cost([s for s in spent if now - s.claimed_at < MONTH], now, config)


def _over_budget(action: Action, week: Sequence[Spent], config: RetrainingPolicy) -> Refusal | None:
    num_runs = sum(s.action is action for s in week)
    most = config.max_runs_per_week
    if action is Action.RECALIBRATE:
        most = config.max_recalibrations_per_week
    if num_runs >= most:
        return Refusal(
            Outcome.BUDGET, f"{num_runs} {KINDS[action]}s in the last seven days, allowed {most}"
        )
    hours = sum(s.seconds or 0.0 for s in week) / 3600
    limit = config.max_run_hours_per_week
    if limit is not None and hours >= limit:
        return Refusal(
            Outcome.BUDGET,
            f"retrainings and recalibrations took {hours:.2f} h in the last seven days, allowed "
            f"{limit:g} h",
        )
    return None


def _over_cost(month: Sequence[Spent], now: datetime, config: RetrainingPolicy) -> Refusal | None:
    """A run is started below the limit only, and one at a time: one run more is the most.

    A run whose end nobody learns, such as that of a host that is gone, is waited for `STILL_RUNS`.
    """
    limit, cost = config.max_cost_per_month, sum(s.amount or 0.0 for s in month)
    runs = [s for s in month if not s.has_ended and now - s.claimed_at < STILL_RUNS]
    if limit is None or (cost < limit and not runs):
        return None
    if cost < limit:
        return Refusal(
            Outcome.BUDGET,
            f"a run of the last days has not ended, so what it costs of {limit:g} is not known",
        )
    return Refusal(
        Outcome.BUDGET,
        f"retrainings and recalibrations cost {cost:.2f} in the last 30 days, allowed {limit:g}",
    )
