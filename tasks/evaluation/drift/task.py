"""Prefect task of the drift room."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.drift import DriftReport
from tasks.contracts.evaluation import ScoredWindow
from tasks.evaluation.drift.config import DriftConfig
from tasks.kernel.retry_policy import RETRIED, ByContent
from tasks.kernel.settings import Settings

TIMEOUT_S = 900


@task(
    name="check-drift",
    task_run_name="check-drift-{current_window.slug}",
    **RETRIED,
    timeout_seconds=TIMEOUT_S,
    persist_result=True,
    result_serializer="json",
    cache_policy=ByContent(task_file=__file__),
)
def check_drift(
    reference: ValidatedDataset,
    reference_window: TimeWindow,
    current: ValidatedDataset,
    current_window: TimeWindow,
    scored_reference: ScoredWindow,
    scored_current: ScoredWindow,
    config: DriftConfig,
    with_unit: tuple[str, ...] = (),
) -> DriftReport:
    """Compare a current window with the reference the model was trained on.

    Safe to retry: it only reads artifacts. `with_unit` names the columns that suites declare to
    have a unit.

    Raises:
        DataContractError: the scores are not of these rows, or a column is absent. Not retried.
        WindowError: a window has too few days to judge. Not retried.
    """
    from tasks.evaluation.drift.compare import compare_windows

    report = compare_windows(
        reference,
        reference_window,
        current,
        current_window,
        scored_reference,
        scored_current,
        config,
        Settings.from_environment().store,
        with_unit,
    )
    create_table_artifact(
        table=feature_rows(report), key="drift-features", description=f"Drift, {report.current}"
    )
    create_markdown_artifact(result_text(report), key="drift-result")
    return report


def feature_rows(report: DriftReport) -> list[dict[str, str]]:
    """One row a feature and one for the predictions, largest effect first."""
    return [
        {
            "feature": change.feature,
            "effect": f"{change.effect:.3f}",
            "surely above": f"{change.effect_low:.3f}",
            "drifted": "yes" if change.drifted else "",
            "PSI": f"{change.psi:.3f}",
            "PSI by sampling": f"{change.psi_noise:.3f}",
            "missing before": f"{change.missing_reference:.1%}",
            "missing now": f"{change.missing_current:.1%}",
        }
        for change in sorted((report.prediction, *report.features), key=lambda f: -f.effect)
    ]


def result_text(report: DriftReport) -> str:
    """The result and its reasons in markdown."""
    lines = [
        f"**{report.result.value.replace('_', ' ')}**: {report.num_current_rows:,} rows of "
        f"{report.current}, against {report.num_reference_rows:,} of {report.reference}.",
        "",
        *(f"- {sentence}" for sentence in report.evidence),
    ]
    return "\n".join(lines)
