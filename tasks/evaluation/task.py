"""Prefect tasks of the evaluation: judgement, calibration, drift and monitoring."""

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from threadpoolctl import threadpool_limits

from tasks.contracts import data, training
from tasks.contracts.base import TimeWindow
from tasks.contracts.drift import DayErrors, DriftReport, ServedWindow
from tasks.contracts.evaluation import (
    BaselineModel,
    Comparison,
    EvaluationReport,
    FeatureRanking,
    FitOutcome,
    Metric,
    MetricSet,
    RegressionMetrics,
    ScoredWindow,
    StudentReport,
)
from tasks.contracts.release import RegisteredProgram
from tasks.evaluation.config import (
    BaselineModelConfig,
    DriftConfig,
    EvaluationConfig,
    MonitoringConfig,
    RecalibrationConfig,
)
from tasks.kernel.retry_policy import reused, uncached
from tasks.kernel.settings import Settings

TIMEOUT_S = 1800
_KEPT = reused(__file__, TIMEOUT_S)


@task(name="fit-baseline-model", task_run_name="fit-baseline-model-{splits.train.slug}", **_KEPT)
def fit_baseline_model(
    dataset: data.ValidatedDataset, splits: data.DataSplits, config: BaselineModelConfig
) -> BaselineModel:
    """Fit gradient boosting on the training window and score the test window with it.

    Safe to retry: the scores appear whole, under a key of their content, or not at all.

    Raises:
        DataContractError: a window has no rows, or its labels are not 0 and 1. Not retried.
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.evaluation.baseline_model import score_baseline_model

    return score_baseline_model(dataset, splits, config, Settings.from_environment().store)


@task(
    name="check-test-window", task_run_name="check-test-{splits.test.slug}", **uncached(TIMEOUT_S)
)
def check_test_window(
    dataset: data.ValidatedDataset, splits: data.DataSplits, config: EvaluationConfig
) -> None:
    """See before training that the test window will be judged.

    Safe to retry: it only reads.

    Raises:
        DataContractError: it holds too few rows, days or labels. Not retried.
        ConfigurationError: a slice names no column. Not retried.
    """
    from tasks.evaluation.metrics import check_test_window as check

    check(dataset, splits.test, config, Settings.from_environment().store)


@task(name="judge-candidate", task_run_name="judge-{trained.splits.test.slug}", **_KEPT)
def judge_candidate(
    trained: training.CandidateModel,
    dataset: data.ValidatedDataset,
    incumbent: RegisteredProgram | None,
    baseline_model: BaselineModel,
    config: EvaluationConfig,
    ranking: FeatureRanking | None = None,
) -> EvaluationReport:
    """Judge a trained model on its test window, against the baseline model and the champion.

    What single inputs tell is filed with the judgement, for the gate that suspects leaks.

    Safe to retry: it reads artifacts and writes one more, whole or not at all.

    Raises:
        DataContractError: the test window cannot be judged, or a program does not give one
            probability a row. Not retried.
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.evaluation.judge import judge_model

    store = Settings.from_environment().store
    report = judge_model(trained, dataset, incumbent, baseline_model, config, store)
    if ranking is not None:
        report = report.model_copy(update={"leading": ranking.features})
    create_table_artifact(metric_rows(report), "evaluation-metrics", f"Test {report.window}")
    create_table_artifact(slice_rows(report), "evaluation-slices", "Quality by slice")
    return report


@task(name="score-window", task_run_name="score-v{model.version.version}-{window.slug}", **_KEPT)
def score_model_window(
    model: RegisteredProgram,
    dataset: data.ValidatedDataset,
    window: TimeWindow,
    config: EvaluationConfig,
) -> ScoredWindow:
    """Score all rows of a window with a registered model, and judge those with a label.

    Safe to retry: the scores appear whole, under a key of their content, or not at all.

    Raises:
        DataContractError: no row in the window, or the program does not give one probability a
            row. Not retried.
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.evaluation.judge import score_window

    return score_window(model, dataset, window, config, Settings.from_environment().store)


@task(
    name="judge-served", task_run_name="judge-served-{served.dataset.snapshot.window.slug}", **_KEPT
)
def judge_served_window(served: ServedWindow, config: EvaluationConfig) -> ScoredWindow:
    """Judge the scores that were served on the rows whose label is known by now.

    Safe to retry: it only reads artifacts.
    """
    from tasks.evaluation.judge import judge_served

    return judge_served(served, config, Settings.from_environment().store)


@task(name="compare-previous", task_run_name="compare-previous-{current.window.slug}", **_KEPT)
def compare_previous(
    previous: ScoredWindow, current: ScoredWindow, dataset: data.ValidatedDataset
) -> Comparison | None:
    """Previous minus current champion on the labelled rows of a window; None with too few labels.

    Safe to retry: it only reads artifacts.

    Raises:
        DataContractError: the two did not score the same rows. Not retried.
    """
    from tasks.evaluation.metrics import compare_scored

    store = Settings.from_environment().store
    return compare_scored(previous, current, dataset.snapshot.columns, store)


@task(name="judge-student", task_run_name="judge-student-of-v{parent.version.version}", **_KEPT)
def judge_student(
    student: training.CompressedModel,
    parent: RegisteredProgram,
    distilled: training.TrainedModel | None,
    control: training.TrainedModel,
    dataset: data.ValidatedDataset,
    config: EvaluationConfig,
) -> StudentReport:
    """Judge a smaller network beside its parent, and the teacher by a control run without one.

    Safe to retry: it only reads artifacts.

    Raises:
        DataContractError: the test window cannot be judged, or a program does not give one
            probability a row. Not retried.
    """
    from tasks.evaluation.judge import judge_networks

    store = Settings.from_environment().store
    report = judge_networks(student, parent, distilled, control, dataset, config, store)
    if report.refusal:
        get_run_logger().warning("not registered: %s", report.refusal)
    return report


@task(name="fit-calibrator", task_run_name="fit-map-{scored.window.slug}", **_KEPT)
def fit_calibrator(
    scored: ScoredWindow, columns: data.DatasetSchema, config: RecalibrationConfig
) -> FitOutcome:
    """Fit a rising map of the scores to the labelled rows of a window, or say why none is fitted.

    Safe to retry: it only reads scores.

    Raises:
        ArtifactError: the scores are absent or damaged. Not retried.
    """
    from tasks.evaluation.recalibration import fit_scored

    outcome = fit_scored(scored, columns, config, Settings.from_environment().store)
    if outcome.refusal:
        get_run_logger().warning("not recalibrated: %s", outcome.refusal)
    return outcome


@task(
    name="weigh-recalibration",
    task_run_name="weigh-{model.splits.test.slug}",
    **uncached(TIMEOUT_S, kept=True),
)
def weigh_recalibration(
    model: training.RecalibratedModel, evaluation: EvaluationReport
) -> str | None:
    """Why the new map is not worth a version, as a sentence; None where it is.

    Safe to retry: it only reads.
    """
    from tasks.evaluation.recalibration import announcement, why_no_gain

    calibration = model.calibration
    refusal = why_no_gain(evaluation, calibration.source.version)
    create_markdown_artifact(
        announcement(calibration, evaluation, refusal),
        key="recalibration",
        description=f"A new map of the scores of version {calibration.source.version}: "
        f"{'not kept' if refusal else 'kept'}",
    )
    if refusal:
        get_run_logger().warning("not recalibrated: %s", refusal)
    return refusal


@task(name="check-drift", task_run_name="check-drift-{current_window.slug}", **_KEPT)
def check_drift(
    reference: data.ValidatedDataset,
    reference_window: TimeWindow,
    current: data.ValidatedDataset,
    current_window: TimeWindow,
    scored_reference: ScoredWindow,
    scored_current: ScoredWindow,
    config: DriftConfig,
    with_unit: tuple[str, ...] = (),
    earlier: tuple[DayErrors, ...] = (),
) -> DriftReport:
    """Compare a current window with the reference the model was trained on.

    Safe to retry: it only reads artifacts. `with_unit` names the columns that suites declare to
    have a unit; `earlier` are days that earlier checks saw the same model score.

    Raises:
        DataContractError: the scores are not of these rows, or a column is absent. Not retried.
        WindowError: a window has too few days to judge. Not retried.
    """
    from tasks.evaluation.drift.compare import compare_windows

    rows = reference, reference_window, current, current_window
    scored = scored_reference, scored_current
    store = Settings.from_environment().store
    with threadpool_limits(1):  # more would take half as much CPU again and save no time
        report = compare_windows(*rows, *scored, config, store, with_unit, earlier)
    create_table_artifact(feature_rows(report), "drift-features", f"Drift, {report.current}")
    create_markdown_artifact(result_text(report), key="drift-result")
    return report


@task(name="monitor-features", task_run_name="monitor-features-{window.slug}", **uncached(600))
def monitor_features(
    tables: data.FeatureTables,
    window: TimeWindow,
    view_keys: dict[str, tuple[str, ...]],
    config: MonitoringConfig,
) -> data.FeatureMonitoring:
    """Keep statistics of the published features, and report what left the baseline.

    Safe to retry: what was measured of a version and window is kept, an alert is raised once.

    Raises:
        DataContractError: a table lacks its keys or times. Not retried.
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.evaluation.monitoring.monitor import monitor_tables

    settings = Settings.from_environment()
    seen = monitor_tables(tables, window, view_keys, config, settings.features_home, settings.store)
    rows = [
        {
            "view": view.view,
            "rows": view.num_rows,
            "age at the end, h": view.age_hours,
            "lag, min": view.lag_minutes,
            "nulls": round(view.null_rate, 4),
            "highest PSI": view.highest_psi,
            "PSI bound": view.psi_bound,
            "alerts": view.num_alerts,
        }
        for view in seen.views
    ]
    meaning = f"Features of {window}, tables {tables.version[:12]}"
    create_table_artifact(rows, "feature-monitoring", meaning)
    lines = [f"- {sentence}" for sentence in seen.alerts] or ["Nothing left the baseline."]
    heading = f"## {seen.num_alerts} alerts of {seen.window}, {seen.num_new_alerts} new"
    create_markdown_artifact(key="feature-alerts", markdown="\n".join([heading, "", *lines]))
    return seen


def metric_rows(report: EvaluationReport) -> list[dict[str, str]]:
    """One row a metric, then one a comparison; brackets hold 95 % intervals."""
    reference, name = dict(report.baseline_model), report.overall.primary_name
    measured = [
        {
            "metric": key.replace("_", " "),
            "model": f"{metric:.4f}",
            report.baseline_model_name: f"{reference[key]:.4f}",
        }
        for key, metric in report.overall
        if isinstance(metric, Metric)
    ]
    compared = [
        {
            "metric": f"minus {part.against.replace('yardstick', 'baseline model')}",
            "model": f"{name} {part.primary:+.4f}, {part.error_name} {part.error:+.4f}",
            report.baseline_model_name: "",
        }
        for part in report.comparisons
    ]
    return measured + compared


def slice_rows(report: EvaluationReport) -> list[dict[str, str]]:
    """One row a judged slice; then the skipped ones, with the reason."""
    name = report.overall.primary_name
    ratio = "RMSE ratio" if isinstance(report.overall, RegressionMetrics) else "calibration error"
    judged = []
    for part in report.slices:
        metrics = part.metrics
        second = metrics.calibration_error if isinstance(metrics, MetricSet) else part.error_ratio
        judged.append(
            {
                "slice": f"{part.column}={part.value}",
                "rows": f"{metrics.num_rows:,}",
                name: f"{metrics.primary:.4f}",
                ratio: f"{second:.4f}" if second else "",
            }
        )
    skipped = {"rows": "", name: "not judged", ratio: ""}
    return judged + [{"slice": text, **skipped} for text in report.skipped_slices]


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
