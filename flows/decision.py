"""Decide: answer a drift verdict - nothing, retrain, recalibrate or roll back - and do it, once."""

from __future__ import annotations

from prefect import flow, runtime

from flows.stages import FOUND, found_but_not_retried
from flows.starting import FlowStarter, can_recalibrate, deployments_of
from tasks.control.retraining.records import Answer, Mode
from tasks.control.retraining.task import (
    answer_verdict,
    find_unsettled,
    read_verdict,
    settle_verdicts,
)
from tasks.kernel.settings import Settings
from tasks.registry.task import find_standing


def decision_run_name() -> str:
    """Name of a run: the beginning of the verdict's digest."""
    return f"decide-{str(runtime.flow_run.parameters.get('verdict_id'))[:12]}"


@flow(
    name="decision",
    flow_run_name=decision_run_name,
    persist_result=True,
    result_serializer="json",
    **FOUND,
)
def decision_flow(verdict_id: str, mode: Mode = "act") -> Answer:
    """Answer one verdict, and all of its model that were stored before it and have no answer.

    Args:
        verdict_id: As the event `falaj.drift.judged` names it.
        mode: `decide_only` records what would be done, and does nothing.

    Raises:
        DataContractError: there is no such verdict.
        ConfigurationError: nothing on this platform retrains its use case; the claim stays, and
            the sweep tries again.
    """
    verdict = read_verdict(verdict_id)
    recalibrates = can_recalibrate(verdict.use_case)
    answer = answer_verdict(verdict, find_standing(verdict.model), mode, recalibrates)
    FlowStarter(Settings.from_environment()).start_all(answer.orders)
    return answer


def advise_on_drift(model: str, use_case: str) -> Answer | None:
    """Record what the controller would do about the newest verdicts of a model, and do nothing.

    For a flow that has just checked drift and ends there, such as the loop of `make run`. Where the
    controller is deployed it answers itself, and advice here would take its question away: None.
    """
    if deployments_of(decision_flow.name):
        return None
    return settle_verdicts(model, use_case, find_standing(model), "decide_only")


@flow(
    name="retraining-sweep",
    persist_result=True,
    result_serializer="json",
    **found_but_not_retried("its next run by schedule does the same"),
)
def retraining_sweep_flow() -> list[Answer]:
    """Bring the controller's table and the world together; nothing happens where both agree.

    Runs that ended are noted first, so that what waited for them is decided with that known.
    """
    starter = FlowStarter(Settings.from_environment())
    starter.note_ends()
    answers = [
        settle_verdicts(
            model, use_case, find_standing(model), recalibrates=can_recalibrate(use_case)
        )
        for model, use_case in find_unsettled()
    ]
    starter.start_left()
    return answers
