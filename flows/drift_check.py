"""Check drift: compare a current window with what the champion was trained on."""

from __future__ import annotations

from prefect import flow

from flows.config import PipelineConfig
from flows.whereabouts import RECORDED
from flows.windows import days_or_newest, drift_run_name
from tasks.contracts.base import TimeWindow
from tasks.contracts.drift import DriftReport
from tasks.drift.task import check_drift
from tasks.evaluation.task import compare_former, score_model_window
from tasks.features.task import build_training_set
from tasks.governor.evidence import asks_for_former
from tasks.governor.task import store_verdict
from tasks.registry.task import fetch_champion, fetch_version, find_standing
from tasks.settings import Settings
from tasks.validation.suites import read_suite
from tasks.validation.task import validate_training_set


@flow(
    name="drift-check",
    flow_run_name=drift_run_name,
    persist_result=True,
    result_serializer="json",
    **RECORDED,
)
def drift_check_flow(window: TimeWindow | None, config: PipelineConfig) -> DriftReport:
    """Say how the window differs from the training reference, and what that asks for.

    The verdict is stored for the governor before it is told of; see `flows.decision`.

    Args:
        window: The current window; its features must have been refreshed. None: the newest
            complete days, as the use case's clock says.
        config: The use case, whose splits give the reference.
    """
    window = days_or_newest(window, config)
    suite = read_suite(Settings.from_environment().feature_repo, config.features.training_set.suite)
    champion = fetch_champion(config.registry)
    reference = validate_training_set(build_training_set(config.window, config.features), suite)
    current = validate_training_set(build_training_set(window, config.features), suite)
    # Rows of the validation window: the champion was not trained on them.
    before = score_model_window(champion, reference, config.splits.validation, config.evaluation)
    now = score_model_window(champion, current, window, config.evaluation)
    report = check_drift(reference, config.splits.train, current, window, before, now, config.drift)
    standing = find_standing(config.registry.model_name)
    difference = None
    if standing and standing.former and asks_for_former(report, standing, config.governor):
        former = fetch_version(standing.former)
        then = score_model_window(former, current, window, config.evaluation)
        difference = compare_former(then, now, current, config.evaluation)
    store_verdict(report, champion.version, standing, difference, config.name, config.governor)
    return report
