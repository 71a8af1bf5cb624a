"""Check drift by volume: enough new rows start a check before the next scheduled one.

A platform's refresh of the newest hours counts them, since every row comes in through it. The
window of the newest verdict says from when on they are new, so a check that a schedule has started
counts too. Without a platform there is nothing to start, and nothing is counted. Rows that were
served are counted in the prediction log, and start the check of what was served.
"""

from __future__ import annotations

from datetime import datetime

from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger
from prefect.utilities.urls import url_for

from flows.config import PipelineConfig
from flows.starting import deployment_for, start_run
from flows.windows import moment_of_run
from tasks.contracts.base import TimeWindow
from tasks.control.retraining.records import StoredVerdict
from tasks.control.retraining.task import find_newest_verdict
from tasks.features.task import count_new_rows
from tasks.predictions.task import count_served_rows
from tasks.registry.task import find_standing

DRIFT_CHECK, DRIFT_CHECK_LOG = "drift-check", "drift-check-log"
TAG = "falaj:by-volume"


def check_drift_by_volume(config: PipelineConfig) -> str | None:
    """Start a drift check where enough rows have come since the last; its run's id, or None.

    As many rows start one run, however often this is called: its key is made of the newest verdict
    and of how many times the limit has been reached since. So a check that failed is started again
    after as many rows more.

    Raises:
        ConfigurationError: drift checks are deployed, but none of this use case.
        TransientError: the API or a database does not answer.
    """
    volume = config.drift.volume
    if volume is None:
        return None
    deployment = deployment_for(DRIFT_CHECK, config.name)
    last = find_newest_verdict(config.registry.model_name, config.name)
    if deployment is None or last is None:  # the first verdict is the loop's, with its model
        return None
    window = config.clock.newest_labelled(moment_of_run())
    since = new_since(last, window, config.clock.shows(moment_of_run()))
    if since >= window.end:
        return None
    new = TimeWindow(start=since, end=window.end)
    num_rows = count_new_rows(volume.table, new, config.features)
    run = None
    if num_rows >= volume.rows:
        run = start_run(
            deployment,
            {"window": window.model_dump(mode="json")},
            key=f"{TAG}:{last.verdict_id}:{num_rows // volume.rows}",
            queue=None,
            tags=[TAG],
        )
    _show(new, num_rows, config, f"{run.name}, {url_for(run) or run.id}" if run else "none yet")
    return str(run.id) if run else None


def check_served_by_volume(config: PipelineConfig) -> str | None:
    """Start a check of what was served where enough was since the last; its run's id, or None.

    As many rows start one run, as those of a table do.

    Raises:
        ConfigurationError: checks of the log are deployed, but none of this use case.
        TransientError: the API or a database does not answer.
    """
    rows = config.drift.served.volume_rows
    if rows is None:
        return None
    deployment = deployment_for(DRIFT_CHECK_LOG, config.name)
    last = find_newest_verdict(config.registry.model_name, config.name)
    standing = find_standing(config.registry.model_name)
    if deployment is None or last is None or standing is None:
        return None
    moment = moment_of_run()
    now = config.clock.shows(moment)
    window = config.clock.newest_labelled(moment)
    since = new_since(last, window, now)
    if since >= window.end:
        return None
    logged = TimeWindow(start=since + (moment - now), end=window.end + (moment - now))
    champion = standing.version
    num_rows = count_served_rows(champion.name, champion.version, logged)
    get_run_logger().info(
        "%s rows that version %s answered in %s, %s start a check of them",
        *(f"{num_rows:,}", champion.version, logged, f"{rows:,}"),
    )
    if num_rows < rows:
        return None
    run = start_run(
        deployment,
        {"window": window.model_dump(mode="json")},
        key=f"{TAG}:served:{last.verdict_id}:{num_rows // rows}",
        queue=None,
        tags=[TAG],
    )
    return str(run.id)


def new_since(last: StoredVerdict, window: TimeWindow, now: datetime) -> datetime:
    """From when on rows are new; all of the window's where recorded data is played from its start.

    Then the newest verdict is of a time that has not come yet.
    """
    return window.start if last.evidence.window.end > now else last.evidence.window.end


def _show(new: TimeWindow, num_rows: int, config: PipelineConfig, run: str) -> None:
    volume = config.drift.volume
    assert volume is not None
    get_run_logger().info(
        "%s rows of %s since the last verdict, %s start a drift check: %s",
        f"{num_rows:,}",
        volume.table,
        f"{volume.rows:,}",
        run,
    )
    create_table_artifact(
        [
            {
                "rows counted": f"{num_rows:,} of {volume.table}",
                "in": str(new),
                "a check starts at": f"{volume.rows:,}",
                "drift check started": run,
            }
        ],
        key="drift-volume",
        description=f"Rows since the newest verdict on {config.registry.model_name}",
    )
