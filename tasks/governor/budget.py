"""May the governor act now? Cool-down, and the budget of a week."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tasks.governor.config import GovernorConfig
from tasks.governor.decision import Action
from tasks.governor.records import Outcome

WEEK = timedelta(days=7)


@dataclass(frozen=True)
class Spent:
    """One earlier retraining of the model."""

    claimed_at: datetime
    seconds: float | None
    """Wall seconds of its run; None while they are not known."""


@dataclass(frozen=True)
class Refusal:
    """Why an action has to wait."""

    outcome: Outcome
    reason: str


def why_not_now(
    action: Action, now: datetime, spent: Sequence[Spent], config: GovernorConfig
) -> Refusal | None:
    """The first bound that an action would break; None where it may be done.

    Rolling back trains nothing and ends harm, so no bound but "once an episode" holds it.

    Args:
        action: what is to be done.
        now: the database's time; no moment in `spent` is later.
        spent: retrainings of the model that were claimed before.
        config: the bounds.
    """
    if action is not Action.RETRAIN:
        return None
    cool_down = timedelta(hours=config.cool_down_hours)
    latest = max((s.claimed_at for s in spent), default=None)
    if latest is not None and now - latest < cool_down:
        return Refusal(
            Outcome.COOL_DOWN,
            f"cool-down of {config.cool_down_hours:g} h since the retraining claimed at "
            f"{latest:%Y-%m-%d %H:%M}Z; free at {latest + cool_down:%Y-%m-%d %H:%M}Z",
        )
    return _over_budget([s for s in spent if now - s.claimed_at < WEEK], config)


def _over_budget(week: Sequence[Spent], config: GovernorConfig) -> Refusal | None:
    if len(week) >= config.max_runs_per_week:
        return Refusal(
            Outcome.BUDGET,
            f"{len(week)} retrainings in the last seven days, allowed {config.max_runs_per_week}",
        )
    hours = sum(s.seconds or 0.0 for s in week) / 3600
    limit = config.max_run_hours_per_week
    if limit is not None and hours >= limit:
        return Refusal(
            Outcome.BUDGET,
            f"retrainings took {hours:.2f} h in the last seven days, allowed {limit:g} h",
        )
    return None
