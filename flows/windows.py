"""Which window a run works on: the one that it was given, or what its use case's clock says."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from prefect import runtime

from tasks.contracts.base import TimeWindow
from tasks.features.tables.ledger import load_ledger
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
    without their past are not like any that were blessed.
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
