"""Check drift: compare a current window with what the champion was trained on.

The window comes from the feature store, or from the log of what was served. The second sees what
clients really sent, and the scores that they really got; the first sees rows that nobody asked for
too.
"""

from __future__ import annotations

from datetime import timedelta

from prefect import flow

from flows.config import PipelineConfig
from flows.whereabouts import RECORDED
from flows.windows import days_or_newest, drift_run_name, moment_of_run, served_run_name
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.drift import DriftReport
from tasks.contracts.evaluation import ScoredWindow
from tasks.contracts.predictions import ServedWindow, TooFewPredictions
from tasks.contracts.release import RegisteredProgram
from tasks.control.retraining.evidence import asks_for_former
from tasks.control.retraining.task import store_verdict
from tasks.evaluation.drift.task import check_drift
from tasks.evaluation.task import compare_former, judge_served_window, score_model_window
from tasks.features.task import build_training_set
from tasks.kernel.settings import Settings
from tasks.predictions.task import take_served_window
from tasks.registry.task import fetch_version, find_champion, find_standing
from tasks.validation.suites import read_suite, read_suites
from tasks.validation.task import validate_training_set


@flow(
    name="drift-check",
    flow_run_name=drift_run_name,
    persist_result=True,
    result_serializer="json",
    **RECORDED,
)
def drift_check_flow(window: TimeWindow | None, config: PipelineConfig) -> DriftReport | None:
    """Say how the window differs from the training reference, and what that asks for.

    The verdict is stored for the governor before it is told of; see `flows.decision`. Before a
    first model is trained there is nothing to compare with, and the result is None.

    Args:
        window: The current window; its features must have been refreshed. None: the newest
            complete days, as the use case's clock says.
        config: The use case, whose splits give the reference.
    """
    window = days_or_newest(window, config)
    suite = read_suite(Settings.from_environment().feature_repo, config.features.training_set.suite)
    champion = find_champion(config.registry)
    if champion is None:
        return None
    reference = validate_training_set(build_training_set(config.window, config.features), suite)
    current = validate_training_set(build_training_set(window, config.features), suite)
    # Rows of the validation window: the champion was not trained on them.
    before = score_model_window(champion, reference, config.splits.validation, config.evaluation)
    now = score_model_window(champion, current, window, config.evaluation)
    report = check_drift(
        *(reference, config.splits.train, current, window, before, now, config.drift),
        columns_with_unit(config),
    )
    hand_over(report, champion, current, now, config)
    return report


@flow(
    name="drift-check-log",
    flow_run_name=served_run_name,
    persist_result=True,
    result_serializer="json",
    **RECORDED,
)
def drift_check_log_flow(
    window: TimeWindow | None, config: PipelineConfig
) -> DriftReport | TooFewPredictions | None:
    """Say how what was served in the window differs from the training reference.

    Only rows that the champion answered as the stable version count. The verdict goes the same way
    as that of `drift-check`. With too few rows there is none, and the result says so. Before a
    first model is trained the result is None.

    Args:
        window: The current window, in the use case's time. None: the newest complete days, as the
            use case's clock says.
        config: The use case, whose splits give the reference.
    """
    window = days_or_newest(window, config)
    suite = read_suite(Settings.from_environment().feature_repo, config.features.training_set.suite)
    champion = find_champion(config.registry)
    if champion is None:
        return None
    reference = validate_training_set(build_training_set(config.window, config.features), suite)
    return check_served(champion, reference, window, config)


def check_served(
    champion: RegisteredProgram,
    reference: ValidatedDataset,
    window: TimeWindow,
    config: PipelineConfig,
) -> DriftReport | TooFewPredictions:
    """Compare what the champion answered in a window with its reference; inside a flow."""
    served = take_served_window(
        champion,
        reference,
        window,
        server_clock_offset(config),
        config.drift.served.min_rows,
        config.drift.min_days,
    )
    if isinstance(served, TooFewPredictions):
        return served
    before = score_model_window(champion, reference, config.splits.validation, config.evaluation)
    now = judge_served_window(served, config.evaluation)
    compared = check_drift(
        *(served.reference, config.splits.train, served.dataset, window, before, now, config.drift),
        columns_with_unit(config),
    )
    report = compared.model_copy(update={"evidence": (*compared.evidence, served.told)})
    hand_over(report, champion, served.dataset, now, config, served)
    return report


def columns_with_unit(config: PipelineConfig) -> tuple[str, ...]:
    """Columns of a training set for which a suite declares a unit, as the training set calls them.

    Raises:
        ConfigurationError: a suite is missing or wrong.
    """
    repo = Settings.from_environment().feature_repo
    suites = {f"{view}__": suite for view, suite in read_suites(repo, config.table_suites).items()}
    suites[""] = read_suite(repo, config.features.training_set.suite)
    return tuple(
        f"{prefix}{name}"
        for prefix, suite in suites.items()
        for names in suite.units.values()
        for name in names
    )


def hand_over(
    report: DriftReport,
    champion: RegisteredProgram,
    current: ValidatedDataset,
    now: ScoredWindow,
    config: PipelineConfig,
    served: ServedWindow | None = None,
) -> None:
    """Store the verdict for the governor, with how the former champion would have done."""
    standing = find_standing(config.registry.model_name)
    difference = None
    whole = served is None or not served.left_out  # else the former cannot score the rows
    if (
        whole
        and standing
        and standing.former
        and asks_for_former(report, standing, config.governor)
    ):
        former = fetch_version(standing.former)
        then = score_model_window(former, current, report.current, config.evaluation)
        difference = compare_former(then, now, current, config.evaluation)
    store_verdict(report, champion.version, standing, difference, config.name, config.governor)


def server_clock_offset(config: PipelineConfig) -> timedelta:
    """From the use case's time to that of servers: whole years where recorded data is played."""
    moment = moment_of_run()
    return moment - config.clock.shows(moment)
