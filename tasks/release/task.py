"""Prefect tasks of releases: begin one, evaluate one, act for a person.

None is cached: what they change is in the metadata database, which keeps each decision once.
"""

from __future__ import annotations

from datetime import UTC, datetime

from prefect import get_run_logger, task
from prefect.events import emit_event

from tasks.contracts.rollout import Action
from tasks.governance.journal import Journal, process_identity
from tasks.kernel.retry_policy import uncached
from tasks.kernel.settings import Settings
from tasks.release.config import ReleaseConfig
from tasks.release.evidence import RequestLog
from tasks.release.records import BY_ITSELF, ByHand, Release
from tasks.release.rollout import Champions, Cycle, Releasing
from tasks.release.traffic import Traffic

EVENTS = {
    Action.START: "falaj.release.started",
    Action.PROMOTE: "falaj.release.promoted",
    Action.ROLL_BACK: "falaj.release.rolled-back",
    Action.SUPERSEDE: "falaj.release.superseded",
}
ENDED, STUCK = "falaj.release.ended", "falaj.release.stuck"
NAMED = {"release_id", "model", "stable", "candidate", "state"}
"""What an event says of its release, beside the step."""
STUCK_RULES = ("timeout", "common_fault", "split")

_POLICY = uncached(600)


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
        traffic: server and gateway.
        champions: the registry.
        actor: who begins it.
        only_if_due: a flow asks whether there is a new champion; a person begins it anyway.
        comment: why, where a person begins it.

    Raises:
        DataContractError: there is nothing to release, or another release is open. Not retried.
        TransientError: server, gateway, registry or database did not answer. Retried.
    """
    releasing = _releasing(traffic, champions)
    releasing.finish(model)
    if only_if_due and releasing.follow_roll_back(model):
        return None
    if only_if_due and not releasing.due(model, config):
        return None
    release = releasing.begin(model, config, actor, comment)
    reason = f"step {release.current.name}" + (f": {comment}" if comment else "")
    emit_release_event(EVENTS[Action.START], release, reason, actor)
    return release


@task(name="find-open-release", task_run_name="find-release-{model}", **_POLICY)
def find_open_release(model: str) -> Release | None:
    """The open release of a model; None where there is none.

    Safe to retry: it only reads.
    """
    from tasks.release.ledger import ReleaseLedger

    return ReleaseLedger(Settings.from_environment().metadata_url).open_release(model)


@task(
    name="evaluate-release",
    task_run_name="evaluate-{release.model}-v{release.candidate}",
    **_POLICY,
)
def evaluate_release(
    release: Release, traffic: Traffic, champions: Champions, log: RequestLog
) -> Cycle:
    """Read what both versions did, decide, record, and move traffic and alias if so decided.

    Safe to retry: a decision is recorded before it is carried out, and the next try carries out
    what is left of it.

    Raises:
        TransientError: server, gateway, registry or database did not answer. Retried.
        DataContractError: the prediction log, or a table of labels, is not as promised. Not
            retried; traffic stays.
    """
    cycle = _releasing(traffic, champions).evaluate(release, log, datetime.now(UTC))
    _report(release, cycle)
    return cycle


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
        TransientError: server, gateway, registry or database did not answer; what was recorded is
            carried out by the next cycle. Retried.
    """
    releasing = _releasing(traffic, champions)
    release = releasing.act_by_hand(model, action, actor, comment, seen)
    reason = comment or f"by {actor}"
    if Action(action) in EVENTS:
        emit_release_event(EVENTS[Action(action)], release, reason, actor)
    return release


def emit_release_event(name: str, release: Release, reason: str, actor: str) -> None:
    """Emit an event about a release, and say it in the journal."""
    subject = {"release": release.title, "step": release.current.name}
    who, outcome = {**process_identity(), "subject": actor}, name.rpartition(".")[2]
    journal = Journal(Settings.from_environment().home / "audit")
    journal.append("release", outcome=outcome, subject=subject, who=who)
    emit_event(
        name,
        resource={
            "prefect.resource.id": f"falaj.model.{release.model}",
            "prefect.resource.role": "model",
        },
        payload=release.model_dump(include=NAMED)
        | {"step": release.current.name, "reason": reason, "actor": actor},
    )


def _report(before: Release, cycle: Cycle) -> None:
    decision, release = cycle.decision, cycle.release
    log = get_run_logger()
    log.info("%s: %s (%s): %s", release.title, decision.action, decision.rule, decision.reason)
    if cycle.was_repaired:
        log.warning("%s: traffic was not as decided; it was set again", release.title)
    names = [EVENTS[decision.action]] if cycle.is_change else []
    if before.is_open and not release.is_open:
        names.append(ENDED)
    if decision.rule in STUCK_RULES and not cycle.is_change:
        names.append(STUCK)
    for name in names:
        emit_release_event(name, release, decision.reason, BY_ITSELF)


def _releasing(traffic: Traffic, champions: Champions) -> Releasing:
    from tasks.release.ledger import ReleaseLedger

    ledger = ReleaseLedger(Settings.from_environment().metadata_url)
    return Releasing(ledger, traffic, champions)
