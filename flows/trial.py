"""Trial: train one point of a search space; a flow of its own, so that a work pool can run it."""

from __future__ import annotations

from prefect import flow

from flows.config import PipelineConfig
from flows.whereabouts import FOUND
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.training import TrialRecord
from tasks.registry.task import record_trials
from tasks.training.search.task import run_trial
from tasks.training.search.trial import TrialOrder


@flow(
    name="trial",
    flow_run_name="trial-{order.number}-of-{order.study}",
    persist_result=True,
    result_serializer="json",
    **FOUND,
)
def trial_flow(order: TrialOrder, dataset: ValidatedDataset, config: PipelineConfig) -> TrialRecord:
    """Train one point, keep the outcome in the study, and write it to MLflow.

    Args:
        order: Which trial of which study, and its point.
        dataset: Validated rows.
        config: The use case.
    """
    trial = run_trial(order, dataset, config.splits)
    record_trials(order.study, (trial,), config.registry)
    return trial
