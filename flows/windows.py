"""Which window a run works on: the one that it was given, or what its use case's clock says."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from prefect import runtime

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DataSplits
from tasks.features.tables.ledger import load_ledger
from tasks.kernel.errors import WindowError
from tasks.kernel.settings import Settings

if TYPE_CHECKING:
    from flows.config import PipelineConfig


def moment_of_run() -> datetime:
    """When the run of this process was to start: the same at each retry, however late it is."""
    moment = runtime.flow_run.scheduled_start_time
    if not isinstance(moment, datetime):
        return datetime.now(UTC)
    # Prefect's own kind of moment loses its zone when hours are added to it.
    return datetime.fromtimestamp(moment.timestamp(), UTC)


def hours_or_newest(window: TimeWindow | None, config: PipelineConfig) -> TimeWindow:
    """The window that was asked for; where none was, the newest complete hours.

    Before anything is online, all hours since the use case's beginning: features of a few hours
    without their past are not like any of the baseline.
    """
    if window is not None:
        return window
    newest = config.clock.newest_hours(moment_of_run())
    if load_ledger(Settings.from_environment().features_home) is not None:
        return newest
    return TimeWindow(start=min(config.window.start, newest.start), end=newest.end)


def days_or_newest(window: TimeWindow | None, config: PipelineConfig) -> TimeWindow:
    """The window that was asked for; where none was, the newest complete days."""
    return window or config.clock.newest_days(moment_of_run())


def refresh_run_name() -> str:
    """Name of a refresh: use case and window."""
    return _run_name("refresh", hours_or_newest)


def drift_run_name() -> str:
    """Name of a drift check: use case and window."""
    return _run_name("drift", days_or_newest)


def served_run_name() -> str:
    """Name of a drift check of what was served: use case and window."""
    return _run_name("served", days_or_newest)


def recalibration_run_name() -> str:
    """Name of a recalibration: use case and window."""
    return _run_name("recalibrate", days_or_newest)


def _run_name(kind: str, chosen: Callable[[TimeWindow | None, PipelineConfig], TimeWindow]) -> str:
    """Prefect asks for the name inside the run, when its parameters have been validated."""
    parameters: dict[str, Any] = runtime.flow_run.parameters
    config = parameters["config"]
    return f"{kind}-{config.name}-{chosen(parameters['window'], config).slug}"


def roll(config: PipelineConfig, moment: datetime) -> PipelineConfig:
    """The use case with its windows moved to the newest complete day; all else is unchanged.

    Training begins where it always did and grows; validation and test are the newest days.

    Raises:
        WindowError: too few days for training lie before them.
    """
    clock = config.clock
    end = clock.day(moment)
    test = clock.day_before(moment, clock.test_days)
    validation = clock.day_before(moment, clock.test_days + clock.validation_days)
    start = config.splits.train.start
    if validation - start < timedelta(days=clock.min_train_days):
        raise WindowError(
            f"{config.name}: between {start:%Y-%m-%d} and {validation:%Y-%m-%d} lie fewer than "
            f"{clock.min_train_days} days to train on; expected at least that many before "
            f"{clock.validation_days} days of validation and {clock.test_days} of test that end at "
            f"{end:%Y-%m-%d}. Wait for more data, or shorten them under `clock`. Nothing was run"
        )
    splits = DataSplits(
        train=TimeWindow(start=start, end=validation),
        validation=TimeWindow(start=validation, end=test),
        test=TimeWindow(start=test, end=end),
    )
    return config.model_copy(
        update={
            "window": TimeWindow(start=config.window.start, end=end),
            "splits": splits,
            "current": clock.newest_days(moment),
        }
    )
