"""Commands of releases, and of the retraining controller's decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from falaj.context import (
    Approver,
    BreakGlass,
    Comment,
    DryRun,
    Here,
    Last,
    Moment,
    Shown,
    acting,
    recorded_act,
    row,
)
from flows.config import read_pipeline_config
from tasks.control.retraining.decision import Action
from tasks.control.retraining.records import Outcome
from tasks.governance.duties import agreed_by_two
from tasks.kernel.errors import DataContractError
from tasks.kernel.values import in_utc
from tasks.release.ledger import ReleaseLedger

if TYPE_CHECKING:
    from tasks.contracts.rollout import Entry
    from tasks.control.retraining.records import Decision
    from tasks.governance.identity import Subject
    from tasks.kernel.settings import Settings
    from tasks.release.records import ByHand, Release
    from tasks.release.rollout import Releasing

ACTS: dict[ByHand | Literal["start"], str] = {
    "start": "Release the champion, also one that was rolled back before.",
    "hold": "Take no further step until it is resumed; harm still rolls back.",
    "resume": "Take the hold away.",
    "promote": "Go to the next step now, or end the release after the last one.",
    "roll_back": "Send all traffic back to the version before, and the alias too.",
}
MAX_ENTRIES = 12
MAX_LISTED = 10_000


Model = Annotated[str | None, Parameter(help="Registered model (default: the use case's).")]
Limit = Annotated[int, Parameter(validator=Number(gte=1, lte=MAX_LISTED))]
app = App(name="release")


@app.command
def status(model: Model = None, /, *, context: Here) -> Shown:
    """Show the newest release, its evidence and its record.

    Examples:
        falaj release status
    """
    ledger = ReleaseLedger(context.settings.metadata_url)
    model = model or read_pipeline_config(context.settings.feature_repo).registry.model_name
    release = ledger.last_release(model)
    if release is None:
        never = f"{model} was never released step by step."
        return Shown({"release": None, "entries": []}, [never])
    return _shown(release, ledger.entries(release.release_id))


def _act(wish: ByHand | Literal["start"]) -> Callable[..., Shown]:
    """The command that does what a person wants with a release.

    It raises DataContractError where there is nothing to release, none is open, or the name is no
    name; TransientError where server, gateway, registry or database did not answer: what was
    recorded is carried out by the next cycle of the release flow.
    """

    def act(
        model: Model = None,
        /,
        *,
        approver: Approver = None,
        comment: Comment = "",
        break_glass: BreakGlass = None,
        dry_run: DryRun = False,
        context: Here,
    ) -> Shown:
        from flows.release import RegistryChampions, release_config, traffic_of
        from tasks.release.rollout import Releasing, check_name

        config, settings = read_pipeline_config(context.settings.feature_repo), context.settings
        name, ledger = model or config.registry.model_name, ReleaseLedger(settings.metadata_url)
        releasing = Releasing(ledger, traffic_of(settings), RegistryChampions(settings))
        if dry_run:
            return _without_acting(releasing, name, wish)
        subject = acting(settings, "approve", approver, break_glass)
        check_name(subject.name)
        if waits := _waits_for_second(releasing, name, wish, subject, settings):
            return waits
        with recorded_act(settings, "change-release", subject, wish.replace("_", ""), model=name):
            if wish == "start":
                release = releasing.begin(name, release_config(config), subject.name, comment)
            else:
                release = releasing.act_by_hand(name, wish, subject.name, comment)
        return _shown(release, ledger.entries(release.release_id))

    verb = f"falaj release {wish.replace('_', '')} --approver Ana"
    act.__doc__ = f'{ACTS[wish]}\n\nExamples:\n    {verb} --dry-run\n    {verb} --comment "seen"'
    return act


for _wish, _purpose in ACTS.items():
    app.command(_act(_wish), name=_wish.replace("_", ""), help=_purpose)


def _waits_for_second(
    releasing: Releasing, model: str, wish: str, subject: Subject, settings: Settings
) -> Shown | None:
    """What is shown where traffic would move on and a second person has not agreed yet."""
    if wish not in ("start", "promote"):  # to hold and to go back, one is enough
        return None
    release = releasing.ledger.open_release(model)
    on = f"{release.release_id} step {release.step}" if release else "none"
    about = {"model": model, "version": str(releasing.champions.champion(model)), "release": on}
    if agreed_by_two(settings.home, subject, "release", {"act": wish, **about}):
        return None
    line = f"{subject.name} agrees; a second approver has to give the same command within a day"
    return Shown({"agreed": subject.name, **about}, [row("Release", line), "Nothing was changed"])


def _without_acting(releasing: Releasing, model: str, wish: str) -> Shown:
    """What an act would begin with.

    Raises:
        DataContractError: there is nothing to act on.
    """
    if wish == "start":
        champion = releasing.champions.champion(model)
        serving = releasing.traffic.tracks(model).get("stable")
        lines = [row("Champion", champion or "none"), row("Serves", serving or "none")]
        return Shown({"champion": champion, "serves": serving}, [*lines, "Nothing was changed"])
    release = releasing.ledger.open_release(model)
    if release is None:
        raise DataContractError(f"no release of {model} is open. Nothing was changed")
    shown = _shown(release, [])
    return replace(shown, lines=[*shown.lines, "Nothing was changed"])


def _shown(release: Release, entries: list[Entry]) -> Shown:
    state = release.state.replace("_", " ")
    held = f", held by {release.held_by}" if release.held_by else ""
    moved = "" if release.is_moved else "; traffic is yet to follow"
    evidence = next((entry.evidence for entry in reversed(entries) if entry.evidence), None)
    step = release.current
    lines = [
        f"{'Release':<10}{release.model} version {release.candidate} (before: {release.stable}), "
        f"{state}{held}{moved}",
        f"{'Step':<10}{step.name}, {release.step + 1} of {len(release.steps)}, since "
        f"{release.step_since:%F %T}Z: {step.candidate_percent:g} % of the requests, copies of "
        f"{step.mirror_percent:g} %",
        *(
            f"{'Evidence':<10}{f.metric.replace('_', ' ')}{', HARM' if f.is_harm else ''}: "
            f"{f.sentence}"
            for f in (evidence.findings if evidence else ())
        ),
        *(
            f"{entry.at:%F %T}Z  {entry.action.value} ({entry.rule}) by {entry.actor}: "
            f"{entry.reason}"
            for entry in entries[-MAX_ENTRIES:]
        ),
    ]
    return Shown({"release": release, "entries": entries}, lines)


def decisions(
    *,
    model: str | None = None,
    use_case: str | None = None,
    action: Action | None = None,
    outcome: Outcome | None = None,
    since: Moment | None = None,
    last: Last | None = None,
    limit: Limit = 50,
    context: Here,
) -> Shown:
    """List the decisions about drift, newest first; with --json with all their evidence.

    Args:
        model: Of this registered model only.
        use_case: Of this use case only.
        action: Of this action only.
        outcome: Of this outcome only.
        since: First moment, such as 2013-12-01T00:00Z.
        last: Those of the newest so long instead, such as 30d.
        limit: At most so many.

    Raises:
        TransientError: the database does not answer.

    Examples:
        falaj decisions --last 30d
        falaj decisions --action retrain --json
    """
    from tasks.control.retraining.ledger import Ledger

    if last is not None:
        since = datetime.now(UTC) - last
    asked = {"model": model, "use_case": use_case, "action": action, "outcome": outcome}
    ledger = Ledger(context.settings.metadata_url)
    found = ledger.decisions(since=in_utc(since) if since else None, limit=limit, **asked)
    none = ["No such decision is recorded; a drift check stores the first result."]
    return Shown(found, [line for made in found for line in _decision(made)] or none)


def _decision(made: Decision) -> list[str]:
    run = f", run {made.run_id}: {made.run_state}" if made.run_id else ""
    return [
        f"{made.decided_at:%F %T}Z  {made.model} version {made.version} ({made.use_case}): "
        f"{made.action.value}, {made.outcome.value}{run}",
        f"{'':<22}{made.reason}",
        f"{'':<22}result {made.result_id[:12]}: {made.evidence.result.value} in "
        f"{made.evidence.window}; by {made.actor}",
    ]
