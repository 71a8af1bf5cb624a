"""Check drift: compare a current window with what the champion was trained on.

The window comes from the feature store, or from the log of what was served. The second sees what
clients really sent, and the scores that they really got; the first sees rows that nobody asked for
too.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from prefect import flow
from prefect.logging import get_run_logger

from flows.candidate import validated_rows
from flows.config import PipelineConfig, suites_of
from flows.decision import deployment_for, start_run
from flows.stages import RECORDED, check_places, days_or_newest, held_back, moment_of_run, run_name
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.drift import DriftReport, ServedWindow, TooFewPredictions
from tasks.contracts.evaluation import ScoredWindow
from tasks.contracts.release import RegisteredProgram
from tasks.control.retraining import task as retraining
from tasks.control.retraining.decision import asks_for_former
from tasks.control.retraining.records import StoredResult
from tasks.evaluation import task as evaluate
from tasks.features.task import count_new_rows
from tasks.kernel.settings import Settings
from tasks.predictions.task import count_served_rows, take_served_window
from tasks.registry.task import fetch_version, find_champion, find_champion_state, find_trained


@flow(name="drift-check", flow_run_name=run_name("drift"), **RECORDED)
def drift_check_flow(window: TimeWindow | None, config: PipelineConfig) -> DriftReport | None:
    """Say how the window differs from the training reference, and what that asks for.

    The result is stored for the controller before it is told of; see `flows.decision`. Before a
    first model is trained there is nothing to compare with, and the result is None.

    Args:
        window: The current window; its features must have been refreshed. None: the newest
            complete days, as the use case's clock says.
        config: The use case, whose splits give the reference.
    """
    check_places(config)
    window = days_or_newest(window, config)
    champion = find_champion(config.registry)
    if champion is None:
        return None
    config = of_champion(config, champion)
    reference, current = validated_rows(config), validated_rows(config, window)
    now = evaluate.score_model_window(champion, current, window, config.evaluation)
    return _compared(champion, reference, current, now, window, config)


@flow(name="drift-check-log", flow_run_name=run_name("served"), **RECORDED)
def drift_check_log_flow(
    window: TimeWindow | None, config: PipelineConfig
) -> DriftReport | TooFewPredictions | None:
    """Say how what was served in the window differs from the training reference.

    Only rows that the champion answered as the stable version count. The result goes the same way
    as that of `drift-check`. With too few rows there is none, and the result says so. Before a
    first model is trained the result is None.

    Args:
        window: The current window, in the use case's time. None: the newest complete days, as the
            use case's clock says.
        config: The use case, whose splits give the reference.
    """
    check_places(config)
    window = days_or_newest(window, config)
    champion = find_champion(config.registry)
    if champion is None:
        return None
    config = of_champion(config, champion)
    return check_served(champion, validated_rows(config), window, config)


def of_champion(config: PipelineConfig, champion: RegisteredProgram) -> PipelineConfig:
    """The use case with the splits of its champion, which a retraining has moved since.

    Rows that the champion was trained on are no reference for its quality: beside them every later
    window looks stale.
    """
    splits = find_trained(config.registry, champion.version.version).splits
    return config if splits == config.splits else config.with_splits(splits)


def check_served(
    champion: RegisteredProgram,
    reference: ValidatedDataset,
    window: TimeWindow,
    config: PipelineConfig,
) -> DriftReport | TooFewPredictions:
    """Compare what the champion answered in a window with its reference; inside a flow."""
    offset = server_clock_offset(config)
    least = config.drift.served.min_rows, config.drift.min_days
    served = take_served_window(champion, reference, window, offset, *least)
    if isinstance(served, TooFewPredictions):
        return served
    now = evaluate.judge_served_window(served, config.evaluation)
    return _compared(champion, reference, served.dataset, now, window, config, served)


def _compared(
    champion: RegisteredProgram,
    reference: ValidatedDataset,
    current: ValidatedDataset,
    now: ScoredWindow,
    window: TimeWindow,
    config: PipelineConfig,
    served: ServedWindow | None = None,
) -> DriftReport:
    """Compare, and store the result for the controller, with how the former champion would do."""
    # Rows of the validation window: the champion was not trained on them.
    before = evaluate.score_model_window(
        champion, reference, config.splits.validation, config.evaluation
    )
    known = served.reference if served else reference
    units = columns_with_unit(config)
    windows = (known, config.splits.train, current, window, before, now)
    earlier = retraining.find_scored_days(champion.version, config.name)
    report = evaluate.check_drift(*windows, config.drift, units, earlier)
    if served:
        report = report.model_copy(update={"evidence": (*report.evidence, served.told)})
    standing, difference = find_champion_state(config.registry.model_name), None
    whole = served is None or not served.left_out  # else the former cannot score the rows
    policy = config.retraining
    if whole and standing and standing.previous and asks_for_former(report, standing, policy):
        former = fetch_version(standing.previous)
        then = evaluate.score_model_window(former, current, report.current, config.evaluation)
        difference = evaluate.compare_previous(then, now, current)
    found = (report, champion.version, standing, difference)
    retraining.store_drift_result(*found, config.name, policy, held_back(config))
    return report


def columns_with_unit(config: PipelineConfig, repo: Path | None = None) -> tuple[str, ...]:
    """Columns of a training set for which a suite declares a unit, as the training set calls them.

    Args:
        config: The use case.
        repo: Its feature repository; None: that of the environment.

    Raises:
        ConfigurationError: a suite is missing or wrong.
    """
    suites = suites_of(config, repo or Settings.from_environment().feature_repo)
    prefixed = {f"{view}__": suite for view, suite in suites.tables.items()}
    return tuple(
        f"{prefix}{name}"
        for prefix, suite in {**prefixed, "": suites.training_set}.items()
        for names in suite.units.values()
        for name in names
    )


def server_clock_offset(config: PipelineConfig) -> timedelta:
    """From the use case's time to that of servers: whole years where recorded data is played."""
    moment = moment_of_run()
    return moment - config.clock.shows(moment)


DRIFT_CHECK, DRIFT_CHECK_LOG = "drift-check", "drift-check-log"
TAG = "falaj:by-volume"


def check_drift_by_volume(config: PipelineConfig) -> str | None:
    """Start a drift check where enough rows have come since the last; its run's id, or None.

    Raises:
        ConfigurationError: drift checks are deployed, but none of this use case.
        TransientError: the API or a database does not answer.
    """
    if (volume := config.drift.volume) is None:
        return None
    table = volume.table

    def count(new: TimeWindow) -> int:
        return count_new_rows(table, new, config.features)

    return _check_by_volume(DRIFT_CHECK, config, table, volume.rows, count, TAG)


def check_served_by_volume(config: PipelineConfig) -> str | None:
    """The same for rows that the champion has answered, by the log of predictions."""
    standing = find_champion_state(config.registry.model_name)
    rows = config.drift.served.volume_rows
    if rows is None or standing is None:
        return None
    champion, offset = standing.version, server_clock_offset(config)

    def count(new: TimeWindow) -> int:
        logged = TimeWindow(start=new.start + offset, end=new.end + offset)
        return count_served_rows(champion.name, champion.version, logged)

    what = f"version {champion.version}"
    return _check_by_volume(DRIFT_CHECK_LOG, config, what, rows, count, f"{TAG}:served")


def _check_by_volume(
    flow_name: str,
    config: PipelineConfig,
    what: str,
    limit: int,
    count: Callable[[TimeWindow], int],
    key: str,
) -> str | None:
    """As many rows start one run, however often this is called.

    Its key is made of the newest result and of how many times the limit has been reached since. So
    a check that failed is started again after as many rows more. The first result is the loop's.
    """
    deployment = deployment_for(flow_name, config.name)
    last = retraining.find_newest_drift_result(config.registry.model_name, config.name)
    if deployment is None or last is None:
        return None
    window = config.clock.newest_labelled(moment_of_run())
    since = new_since(last, window, config.clock.shows(moment_of_run()))
    if since >= window.end:
        return None
    num_rows = count(TimeWindow(start=since, end=window.end))
    run = None
    if num_rows >= limit:
        key = f"{key}:{last.result_id}:{num_rows // limit}"
        asked = {"window": window.model_dump(mode="json")}
        run = start_run(deployment.id, asked, key=key, tags=[TAG])
    get_run_logger().info(
        "%s rows of %s since the last drift result, %s start a check: %s",
        *(f"{num_rows:,}", what, f"{limit:,}", run.name if run else "none yet"),
    )
    return str(run.id) if run else None


def new_since(last: StoredResult, window: TimeWindow, now: datetime) -> datetime:
    """From when on rows are new; all of the window's where recorded data is played from its start.

    Then the newest result is of a time that has not come yet.
    """
    return window.start if last.evidence.window.end > now else last.evidence.window.end
