"""Prefect tasks of the calibration room."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from tasks.contracts.data import DatasetSchema
from tasks.contracts.evaluation import EvaluationReport, FitOutcome, ScoredWindow
from tasks.contracts.training import RecalibratedModel
from tasks.evaluation.calibration.config import RecalibrationConfig
from tasks.kernel.retry_policy import RETRIED, ByContent
from tasks.kernel.settings import Settings

_POLICY: dict[str, Any] = {
    **RETRIED,
    "timeout_seconds": 300,
    "persist_result": True,
    "result_serializer": "json",
}


@task(
    name="fit-calibrator",
    task_run_name="fit-map-{scored.window.slug}",
    cache_policy=ByContent(task_file=__file__),
    **_POLICY,
)
def fit_calibrator(
    scored: ScoredWindow, columns: DatasetSchema, config: RecalibrationConfig
) -> FitOutcome:
    """Fit a rising map of the scores to the labelled rows of a window, or say why none is fitted.

    Safe to retry: it only reads scores.

    Raises:
        ArtifactError: the scores are absent or damaged. Not retried.
    """
    from tasks.evaluation.calibration.fit import fit_scored

    outcome = fit_scored(scored, columns, config, Settings.from_environment().store)
    if outcome.refusal:
        get_run_logger().warning("not recalibrated: %s", outcome.refusal)
    return outcome


@task(
    name="weigh-recalibration",
    task_run_name="weigh-{model.splits.test.slug}",
    cache_policy=NO_CACHE,
    **_POLICY,
)
def weigh_recalibration(model: RecalibratedModel, evaluation: EvaluationReport) -> str | None:
    """Why the new map is not worth a version, as a sentence; None where it is.

    Safe to retry: it only reads.
    """
    from tasks.evaluation.calibration.gain import announcement, why_no_gain

    calibration = model.calibration
    refusal = why_no_gain(evaluation, calibration.source.version)
    against = f"champion:{calibration.source.version}"
    found = next((c for c in evaluation.comparisons if c.against == against), None)
    whole = f"{calibration.whole_map.slope:.4f} x {calibration.whole_map.intercept:+.4f}"
    create_markdown_artifact(
        announcement(calibration.fit, whole, found, refusal),
        key="recalibration",
        description=f"A new map of the scores of version {calibration.source.version}: "
        f"{'not kept' if refusal else 'kept'}",
    )
    if refusal:
        get_run_logger().warning("not recalibrated: %s", refusal)
    return refusal
