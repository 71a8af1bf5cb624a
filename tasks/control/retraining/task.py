"""Prefect tasks of the controller: store a drift result, emit its event, answer results, note ends.

None is cached: what they change is in the database, which keeps each result and each answer once.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from prefect import runtime, task
from prefect.artifacts import create_table_artifact
from prefect.events import emit_event

from tasks.contracts.base import ModelVersionRef
from tasks.contracts.drift import DayErrors, DriftReport
from tasks.contracts.evaluation import Comparison
from tasks.contracts.release import ChampionState
from tasks.control.config import RetrainingPolicy
from tasks.control.retraining.records import Answer, Decision, Mode, StoredResult
from tasks.governance.journal import Journal
from tasks.kernel.retry_policy import uncached
from tasks.kernel.settings import Settings

if TYPE_CHECKING:
    from tasks.control.retraining.incidents import Here
    from tasks.control.retraining.ledger import Ledger

JUDGED, DECIDED = "falaj.drift.judged", "falaj.decision.made"

_POLICY = uncached(300)


@task(name="store-drift-result", task_run_name="store-drift-result-{version.name}", **_POLICY)
def store_drift_result(
    report: DriftReport,
    version: ModelVersionRef,
    champion: ChampionState | None,
    former_difference: Comparison | None,
    use_case: str,
    policy: RetrainingPolicy,
    held_back: timedelta,
) -> StoredResult:
    """Keep the result of a drift check, then emit `falaj.drift.judged`.

    The event only saves time: should it be lost, the sweep finds the result.

    Safe to retry: a result is kept once, under the digest of its content.

    Raises:
        TransientError: the database does not answer. Retried.
    """
    from tasks.control.retraining.decision import gather

    now = datetime.now(UTC)
    evidence = gather(report, version, champion, former_difference, now, held_back)
    result = _ledger().store_result(version.name, use_case, evidence, policy)
    emit_event(
        JUDGED,
        resource={**_resource(version.name), "falaj.verdict": evidence.result.value},
        payload={
            "verdict_id": result.result_id,
            "model": version.name,
            "use_case": use_case,
            "verdict": evidence.result.value,
            "window": str(evidence.window),
        },
    )
    return result


@task(name="read-drift-result", task_run_name="read-drift-result-{result_id}", **_POLICY)
def read_drift_result(result_id: str) -> StoredResult:
    """A stored drift result.

    Safe to retry: it only reads.

    Raises:
        DataContractError: there is none. Not retried.
    """
    return _ledger().result(result_id)


@task(name="find-newest-drift-result", task_run_name="newest-result-{model}", **_POLICY)
def find_newest_drift_result(model: str, use_case: str) -> StoredResult | None:
    """The result on a model that was stored last; None before the first.

    Safe to retry: it only reads.

    Raises:
        TransientError: the database does not answer. Retried.
    """
    return _ledger().newest_result(model, use_case)


@task(name="find-scored-days", task_run_name="scored-days-{version.name}", **_POLICY)
def find_scored_days(version: ModelVersionRef, use_case: str) -> tuple[DayErrors, ...]:
    """Days that earlier drift checks saw a version score, for the sequential test of all days.

    Safe to retry: it only reads.

    Raises:
        TransientError: the database does not answer. Retried.
    """
    return tuple(_ledger().scored_days(version.name, use_case, version.version))


@task(name="answer-drift-result", task_run_name="answer-{result.model}", **_POLICY)
def answer_drift_result(
    result: StoredResult, champion: ChampionState | None, mode: Mode, recalibrates: bool
) -> Answer:
    """Answer a drift result and all of its model that have no answer, and claim what is to be done.

    Safe to retry: an answer is given in one transaction, and once.

    Args:
        result: what a drift check found.
        champion: of the champion.
        mode: whether anything is claimed.
        recalibrates: something here carries out a recalibration; else it becomes a retraining.

    Raises:
        TransientError: the database does not answer. Retried.
    """
    from tasks.control.retraining.incidents import answer

    here = _here(champion, mode, recalibrates)
    return _reported(answer(_ledger(), result.result_id, _actor(), here))


@task(name="settle-drift-results", task_run_name="settle-{model}", **_POLICY)
def settle_drift_results(
    model: str,
    use_case: str,
    champion: ChampionState | None,
    mode: Mode = "act",
    recalibrates: bool = True,
) -> Answer:
    """Answer what nobody answered, and look again at trouble that had to wait.

    Safe to retry: an answer is given in one transaction, and once.

    Raises:
        TransientError: the database does not answer. Retried.
    """
    from tasks.control.retraining.incidents import settle

    here = _here(champion, mode, recalibrates)
    return _reported(settle(_ledger(), model, use_case, _actor(), here))


@task(name="find-unsettled", **_POLICY)
def find_unsettled() -> list[tuple[str, str]]:
    """Models and use cases with results that nobody answered, or trouble that had to wait.

    Safe to retry: it only reads.
    """
    return _ledger().unsettled()


def decision_rows(decisions: tuple[Decision, ...]) -> list[dict[str, str]]:
    """One row a decision, for a table that people read."""
    return [
        {
            "decided": f"{made.decided_at:%Y-%m-%d %H:%M:%S}Z",
            "model": f"{made.model} version {made.version}",
            "use case": made.use_case,
            "window": str(made.evidence.window),
            "result": made.evidence.result.value,
            "action": made.action.value,
            "outcome": made.outcome.value,
            "reason": made.reason,
            "run": made.run_id or "",
            "incident": (made.incident_id or "")[:12],
        }
        for made in decisions
    ]


def _reported(answered: Answer) -> Answer:
    """Show new decisions in the UI, and emit an event for each."""
    if not answered.decisions:
        return answered
    create_table_artifact(
        key="decisions",
        table=decision_rows(answered.decisions),
        description="; ".join(f"{d.action}: {d.outcome}" for d in answered.decisions[-3:]),
    )
    journal = Journal(Settings.from_environment().home / "audit")
    for made in answered.decisions:
        subject = {"model": made.model, "action": made.action.value, "result": made.result_id}
        outcome = made.outcome.value
        journal.append("decide", outcome=outcome, subject=subject, use_case=made.use_case)
        emit_event(
            DECIDED,
            resource={
                **_resource(made.model),
                "falaj.action": made.action.value,
                "falaj.outcome": made.outcome.value,
            },
            payload={
                "decision": made.number,
                "verdict_id": made.result_id,
                "model": made.model,
                "use_case": made.use_case,
                "action": made.action.value,
                "outcome": made.outcome.value,
                "reason": made.reason,
                "episode_id": made.incident_id,
            },
        )
    return answered


def _ledger() -> Ledger:
    from tasks.control.retraining.ledger import Ledger

    return Ledger(Settings.from_environment().metadata_url)


def _here(champion: ChampionState | None, mode: Mode, recalibrates: bool) -> Here:
    from tasks.control.retraining.incidents import Here

    if champion is None:
        return Here(None, recalibrates, None, mode)
    return Here(champion.version.version, recalibrates, champion.asked_about, mode)


def _resource(model: str) -> dict[str, str]:
    return {"prefect.resource.id": f"falaj.model.{model}", "prefect.resource.name": model}


def _actor() -> str:
    name, run_id = runtime.flow_run.flow_name, runtime.flow_run.id
    return f"flow {name}, run {run_id}" if run_id else "a call outside of any flow"
