"""Prefect tasks of releases: begin one, look at one, act for a person, tell in the UI.

None is cached: what they change is in the database of operation, which keeps each decision once.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from tasks.kernel.retry_policy import RETRIED
from tasks.kernel.settings import Settings
from tasks.release.config import ReleaseConfig
from tasks.release.looking import Look
from tasks.release.records import BY_ITSELF, Action, ByHand, Release

if TYPE_CHECKING:
    from tasks.release.acting import Champions, Releasing
    from tasks.release.evidence import Labels
    from tasks.release.traffic import Traffic

EVENTS = {
    Action.START: "falaj.release.started",
    Action.PROMOTE: "falaj.release.promoted",
    Action.ROLL_BACK: "falaj.release.rolled-back",
    Action.SUPERSEDE: "falaj.release.superseded",
}
ENDED, STUCK = "falaj.release.ended", "falaj.release.stuck"
STUCK_RULES = ("timeout", "common_fault", "split")

_POLICY: dict[str, Any] = {
    **RETRIED,
    "timeout_seconds": 600,
    "cache_policy": NO_CACHE,
}


@task(name="begin-release", task_run_name="begin-release-{model}", **_POLICY)
def begin_release(
    model: str,
    config: ReleaseConfig,
    traffic: Traffic,
    champions: Champions,
    actor: str,
    *,
    only_if_due: bool,
    comment: str = "",
) -> Release | None:
    """Open a release of the champion and set its first step; None where none is due.

    Safe to retry: one release of a model is open at a time, and setting traffic twice changes
    nothing.

    Args:
        model: registered model.
        config: its steps and bounds.
        traffic: server and edge.
        champions: the registry.
        actor: who begins it.
        only_if_due: a flow asks whether there is a new champion; a person begins it anyway.
        comment: why, where a person begins it.

    Raises:
        DataContractError: there is nothing to release, or another release is open. Not retried.
        TransientError: server, edge, registry or database did not answer. Retried.
    """
    releasing = _releasing(traffic, champions)
    releasing.finish(model)
    if only_if_due and releasing.follow_roll_back(model):
        return None
    if only_if_due and not releasing.due(model, config):
        return None
    release = releasing.begin(model, config, actor, comment)
    said = f": {comment}" if comment else ""
    tell_event(EVENTS[Action.START], release, f"step {release.current.name}{said}", actor)
    return release


@task(name="find-open-release", task_run_name="find-release-{model}", **_POLICY)
def find_open_release(model: str) -> Release | None:
    """The open release of a model; None where there is none.

    Safe to retry: it only reads.
    """
    from tasks.release.ledger import ReleaseLedger

    return ReleaseLedger(Settings.from_environment().metadata_url).open_release(model)


@task(name="look-at-release", task_run_name="look-{release.model}-v{release.candidate}", **_POLICY)
def look_at_release(
    release: Release, traffic: Traffic, champions: Champions, labels: Labels
) -> Look:
    """Read what both versions did, decide, record, and move traffic and alias if so decided.

    Safe to retry: a decision is recorded before it is carried out, and the next try carries out
    what is left of it.

    Raises:
        TransientError: server, edge, registry or database did not answer. Retried.
        DataContractError: the prediction log, or a table of labels, is not as promised. Not
            retried; traffic stays.
    """
    from tasks.release.looking import look

    home = Settings.from_environment().home
    seen = look(_releasing(traffic, champions), release, labels, home, datetime.now(UTC))
    _tell_look(release, seen)
    return seen


@task(name="act-on-release", task_run_name="{action}-{model}", **_POLICY)
def act_on_release(
    model: str,
    action: ByHand,
    actor: str,
    comment: str,
    traffic: Traffic,
    champions: Champions,
    seen: Release | None,
) -> Release:
    """Do what a person wants with the open release of a model, and record who wanted it.

    Safe to retry: what was recorded of the release as it was seen is brought to its end, and goes
    no further step.

    Raises:
        DataContractError: no release of the model is open. Not retried.
        TransientError: server, edge, registry or database did not answer; what was recorded is
            carried out by the next look. Retried.
    """
    from tasks.release.acting import act_by_hand

    release = act_by_hand(_releasing(traffic, champions), model, action, actor, comment, seen)
    reason = comment or f"by {actor}"
    if Action(action) in EVENTS:
        tell_event(EVENTS[Action(action)], release, reason, actor)
    return release


@task(name="show-release", task_run_name="show-{release.model}-v{release.candidate}", **_POLICY)
def show_release(release: Release) -> str:
    """Write the release's page, and its evidence as artifacts in the UI; returns the page's path.

    Safe to retry: it only reads, and replaces the page.
    """
    from tasks.release.ledger import ReleaseLedger
    from tasks.release.page import picture, write_page

    settings = Settings.from_environment()
    entries = ReleaseLedger(settings.metadata_url).entries(release.release_id)
    page = write_page(release, entries, settings.home)
    evidence = next((e.evidence for e in reversed(entries) if e.evidence), None)
    create_table_artifact(
        key="release-evidence",
        table=[
            {
                "metric": f.metric.replace("_", " "),
                "state": "WORSE" if f.is_harm else "no harm shown",
                "estimate": f.estimate,
                "at least": f.low,
                "at most": f.high,
                "of": f.num,
                "evidence": f.sentence,
            }
            for f in (evidence.findings if evidence else ())
        ],
        description=f"{release.title}: {entries[-1].reason}",
    )
    drawn = picture(release, entries)
    create_markdown_artifact(
        key="release",
        markdown=f"## {release.title}\n\n{release.state.replace('_', ' ')}, step "
        f"{release.current.name}. {entries[-1].reason}.\n\n"
        f"![bounds over time]({drawn})\n\nPage: `{page}`\n",
    )
    return str(page)


def tell_event(name: str, release: Release, reason: str, actor: str) -> None:
    """Emit an event about a release."""
    emit_event(
        name,
        resource={
            "prefect.resource.id": f"falaj.model.{release.model}",
            "prefect.resource.role": "model",
        },
        payload={
            "release_id": release.release_id,
            "model": release.model,
            "stable": release.stable,
            "candidate": release.candidate,
            "state": release.state,
            "step": release.current.name,
            "reason": reason,
            "actor": actor,
        },
    )


def _tell_look(before: Release, seen: Look) -> None:
    decision, release = seen.decision, seen.release
    log = get_run_logger()
    log.info("%s: %s (%s): %s", release.title, decision.action, decision.rule, decision.reason)
    if seen.was_repaired:
        log.warning("%s: traffic was not as decided; it was set again", release.title)
    if seen.is_change:
        tell_event(EVENTS[decision.action], release, decision.reason, BY_ITSELF)
    if before.is_open and not release.is_open:
        tell_event(ENDED, release, decision.reason, BY_ITSELF)
    if decision.rule in STUCK_RULES and decision.action is Action.HOLD:
        tell_event(STUCK, release, decision.reason, BY_ITSELF)


def _releasing(traffic: Traffic, champions: Champions) -> Releasing:
    from tasks.release.acting import Releasing
    from tasks.release.ledger import ReleaseLedger

    ledger = ReleaseLedger(Settings.from_environment().metadata_url)
    return Releasing(ledger, traffic, champions)
