"""Prefect tasks of the prediction log. None is cached: the log grows while they wait."""

from datetime import UTC, datetime, timedelta

from prefect import task
from prefect.artifacts import create_markdown_artifact

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.drift import ServedWindow, TooFewPredictions
from tasks.contracts.release import RegisteredProgram
from tasks.kernel.retry_policy import uncached
from tasks.kernel.settings import Settings


@task(
    name="take-served-window",
    task_run_name="served-v{model.version.version}-{window.slug}",
    **uncached(1800),
)
def take_served_window(
    model: RegisteredProgram,
    reference: ValidatedDataset,
    window: TimeWindow,
    offset: timedelta,
    min_rows: int,
    min_days: int,
) -> ServedWindow | TooFewPredictions:
    """Rows of the prediction log that one version answered as stable, with their labels.

    Safe to retry: the rows appear whole, under a key of their content, or not at all.

    Raises:
        DataContractError: the log has no feature of the model, or scores that are no numbers. Not
            retried.
    """
    from tasks.predictions.served_window import take_served_window as take

    settings = Settings.from_environment()
    home, store, now = settings.home, settings.store, datetime.now(UTC)
    served = take(home, model, reference, window, offset, min_rows, min_days, store, now)
    sentence = served.reason if isinstance(served, TooFewPredictions) else served.told
    create_markdown_artifact(f"{sentence[:1].upper()}{sentence[1:]}.", key="served-window")
    return served


@task(name="count-served-rows", task_run_name="count-served-{model}-v{version}", **uncached(600))
def count_served_rows(model: str, version: int, window: TimeWindow) -> int:
    """Rows of a window, by the server's clock, that a version answered as stable.

    Safe to retry: it only reads.
    """
    from tasks.predictions.served_window import count_served

    return count_served(Settings.from_environment().home, model, str(version), window)
