"""Check drift: compare a current window with what the champion was trained on."""

from __future__ import annotations

from prefect import flow

from flows.config import PipelineConfig
from tasks.contracts import DriftReport, TimeWindow
from tasks.drift.task import check_drift
from tasks.evaluation.task import score_model_window
from tasks.features.task import build_training_set
from tasks.lineage.task import RECORDED
from tasks.registry.task import fetch_champion
from tasks.settings import Settings
from tasks.validation.suites import read_suite
from tasks.validation.task import validate_training_set


@flow(
    name="drift-check",
    flow_run_name="drift-{config.name}-{window.slug}",
    persist_result=True,
    result_serializer="json",
    **RECORDED,
)
def drift_check_flow(window: TimeWindow, config: PipelineConfig) -> DriftReport:
    """Say how the window differs from the training reference, and what that asks for.

    Args:
        window: the current window; its features must have been refreshed.
        config: the use case, whose splits give the reference.
    """
    suite = read_suite(Settings.from_environment().feature_repo, config.features.training_set.suite)
    champion = fetch_champion(config.registry)
    reference = validate_training_set(build_training_set(config.window, config.features), suite)
    current = validate_training_set(build_training_set(window, config.features), suite)
    # Rows of the validation window: the champion was not trained on them.
    before = score_model_window(champion, reference, config.splits.validation, config.evaluation)
    now = score_model_window(champion, current, window, config.evaluation)
    return check_drift(reference, config.splits.train, current, window, before, now, config.drift)
