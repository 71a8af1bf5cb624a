"""Retrain by schedule: the whole loop, with the use case's windows rolled to the newest day."""

from __future__ import annotations

from prefect import flow

from flows.clock import roll
from flows.config import PipelineConfig
from flows.pipeline import run_loop
from flows.whereabouts import RECORDED
from flows.windows import moment_of_run
from tasks.contracts.run import RunRecord


@flow(
    name="retraining",
    flow_run_name="retrain-{config.name}",
    persist_result=True,
    result_serializer="json",
    **RECORDED,
)
def retraining_flow(config: PipelineConfig) -> RunRecord:
    """Run the loop on the newest complete days: the safety net below the retraining by drift.

    Args:
        config: The use case; its `clock` says which days.

    Raises:
        WindowError: too few days for training lie before those for validation and test.
    """
    return run_loop(roll(config, moment_of_run()))
