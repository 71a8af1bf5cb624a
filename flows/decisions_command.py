"""`python -m flows decisions`: what the governor decided, refused and did, from its record."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import Settings

if TYPE_CHECKING:
    from tasks.control.retraining.records import Decision

MAX_LISTED = 10_000


def add_decisions_command(commands: Any) -> None:
    """Add the command's arguments."""
    from tasks.control.retraining.decision import Action
    from tasks.control.retraining.records import Outcome

    decisions = commands.add_parser(
        "decisions", help="list what was decided about drift, newest first"
    )
    decisions.add_argument("--model", help="of this registered model only")
    decisions.add_argument("--use-case", help="of this use case only")
    decisions.add_argument("--action", choices=[a.value for a in Action])
    decisions.add_argument("--outcome", choices=[o.value for o in Outcome])
    decisions.add_argument("--since", help="first moment, such as 2013-12-01T00:00Z")
    decisions.add_argument("--limit", type=int, default=50, help="at most so many (default: 50)")
    decisions.add_argument("--json", action="store_true", help="one JSON object a line, whole")


def show_decisions(options: argparse.Namespace, settings: Settings) -> list[str]:
    """The record, one decision or refusal a line; with `--json` with all its evidence.

    Raises:
        ConfigurationError: `--since` is no moment, or `--limit` no number of rows.
        TransientError: the database does not answer.
    """
    from tasks.control.retraining.decision import Action
    from tasks.control.retraining.ledger import Ledger, Wanted
    from tasks.control.retraining.records import Outcome

    if not 1 <= options.limit <= MAX_LISTED:
        raise ConfigurationError(
            f"--limit is {options.limit}; expected 1 to {MAX_LISTED:,}. Nothing was read"
        )
    wanted = Wanted(
        model=options.model,
        use_case=options.use_case,
        action=Action(options.action) if options.action else None,
        outcome=Outcome(options.outcome) if options.outcome else None,
        since=_moment(options.since) if options.since else None,
        limit=options.limit,
    )
    found = Ledger(settings.operation_url).decisions(wanted)
    if options.json:
        return [json.dumps(made.model_dump(mode="json")) for made in found]
    if not found:
        return ["No such decision is recorded; a drift check stores the first verdict."]
    return [line for made in found for line in _lines(made)]


def _lines(made: Decision) -> list[str]:
    run = f", run {made.run_id}: {made.run_state}" if made.run_id else ""
    return [
        f"{made.decided_at:%F %T}Z  {made.model} version {made.version} ({made.use_case}): "
        f"{made.action.value}, {made.outcome.value}{run}",
        f"{'':<22}{made.reason}",
        f"{'':<22}verdict {made.verdict_id[:12]}: {made.evidence.verdict.value} in "
        f"{made.evidence.window}; by {made.actor}",
    ]


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as exc:
        raise ConfigurationError(
            f"{text!r} is no date and time; write it as 2013-12-01T00:00Z. Nothing was read"
        ) from exc
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
