"""Sweep: answer verdicts whose event was lost, start what a killed process left, note ends."""

from __future__ import annotations

from prefect import flow

from flows.starting import FlowStarter, can_recalibrate
from flows.whereabouts import found_but_not_retried
from tasks.control.retraining.records import Answer
from tasks.control.retraining.task import find_unsettled, settle_verdicts
from tasks.kernel.settings import Settings
from tasks.registry.task import find_standing


@flow(
    name="governor-sweep",
    persist_result=True,
    result_serializer="json",
    **found_but_not_retried("its next run by schedule does the same"),
)
def governor_sweep_flow() -> list[Answer]:
    """Bring the governor's table and the world together; nothing happens where both agree.

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
