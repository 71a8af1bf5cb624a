"""Prefect tasks of this room: gates between landing, feature tables and training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import task
from prefect.artifacts import create_link_artifact, create_table_artifact

from tasks.contracts import data
from tasks.contracts.base import TimeWindow
from tasks.kernel.retry_policy import reused, uncached
from tasks.kernel.settings import Settings
from tasks.validation.suites import Suite

if TYPE_CHECKING:
    from tasks.validation.outcome import SuiteOutcome

TIMEOUT_S = 900


# Every gate is safe to retry: it only reads, and a result is kept whole under a key of its content.
_GATE = reused(__file__, TIMEOUT_S)


@task(name="validate-rows", task_run_name="validate-rows-{landed.window.slug}", **_GATE)
def validate_landed_rows(landed: data.LandedRows, suites: dict[str, Suite]) -> data.ValidatedRows:
    """Check every landed table against its suite; the suites' content is part of the cache key.

    Safe to retry: it only reads, and a result is kept whole under a key of its content.

    Raises:
        DataContractError: a table breaks its contract. Not retried.
    """
    validations = _validated(landed.tables, suites, landed.window, "No feature table was changed")
    return data.ValidatedRows(landed=landed, validations=validations)


@task(
    name="validate-feature-tables", task_run_name="validate-feature-tables-{window.slug}", **_GATE
)
def validate_feature_tables(
    tables: data.FeatureTables, window: TimeWindow, suites: dict[str, Suite]
) -> tuple[data.ValidationResult, ...]:
    """Check every feature table of a version before it is published.

    Safe to retry: it only reads, and a result is kept whole under a key of its content.

    Raises:
        DataContractError: a table breaks its contract. Not retried.
    """
    return _validated(tables.tables, suites, window, "Nothing was published or materialized")


def _validated(
    tables: tuple[data.TableRef, ...],
    suites: dict[str, Suite],
    window: TimeWindow,
    left_undone: str,
) -> tuple[data.ValidationResult, ...]:
    from tasks.validation.runner import validate_tables

    store = Settings.from_environment().store
    return validate_tables(tables, suites, window, store, left_undone, _show)


@task(
    name="validate-training-set",
    task_run_name="validate-{snapshot.feature_service}-{snapshot.window.slug}",
    **_GATE,
)
def validate_training_set(
    snapshot: data.FeatureSnapshot, suite: Suite, splits: data.DataSplits | None = None
) -> data.ValidatedDataset:
    """Check a training set, leaks included; nothing trains without what this returns.

    Safe to retry: it only reads, and a result is kept whole under a key of its content.

    Args:
        snapshot: The training set.
        suite: What must hold.
        splits: Windows that a model is to be trained and judged on; None where none is.

    Raises:
        DataContractError: the snapshot breaks its contract, or a window of the splits cannot be
            learned from. Not retried.
    """
    from tasks.validation.runner import validate_snapshot

    store = Settings.from_environment().store
    return validate_snapshot(snapshot, suite, store, show=_show, splits=splits)


@task(name="publish-data-docs", task_run_name="data-docs", **uncached(TIMEOUT_S))
def publish_data_docs() -> None:
    """Show all kept validation results as Great Expectations' data docs, a static site.

    Safe to retry: finished pages are kept, and the index is written last.

    Raises:
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.validation.docs import build_site

    settings = Settings.from_environment()
    site = build_site(settings.store, settings.home)
    create_link_artifact(
        link=site.index.as_uri(),
        link_text="Data docs",
        key="data-docs",
        description=f"{site.num_pages} validation results",
    )


def _show(outcome: SuiteOutcome) -> None:
    """The expectations as a table in the Prefect UI, below a summary, for good and bad outcomes."""
    key = f"validation-{outcome.suite}".replace("_", "-")
    create_table_artifact(key=key, table=outcome.rows(), description=_summary(outcome))


def _summary(outcome: SuiteOutcome) -> str:
    failed, warned = outcome.with_status("failed"), outcome.with_status("warned")
    num_skipped = len(outcome.checks) - outcome.num_judged
    lines = [
        f"**{outcome.subject}: {'passed' if outcome.passed else 'refused'}**. "
        f"{outcome.num_rows:,} rows, {outcome.window}. Suite `{outcome.suite}`: "
        f"{outcome.num_judged} expectations judged, {len(failed)} failed, "
        f"{len(warned)} warnings, {num_skipped} not judged for want of rows.\n",
        *(f"- **looks like**: {fault}" for fault in outcome.looks_like),
        *(f"- **refused**: {fault}" for fault in outcome.faults),
        *(f"- warning: {check.sentence}" for check in warned),
    ]
    return "\n".join(lines)
