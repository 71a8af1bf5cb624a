"""Prefect tasks of the evaluation room."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DataSplits, ValidatedDataset
from tasks.contracts.drift import ServedWindow
from tasks.contracts.evaluation import (
    BaselineModel,
    Comparison,
    EvaluationReport,
    FeatureRanking,
    Metric,
    MetricSet,
    RegressionMetrics,
    ScoredWindow,
    StudentReport,
)
from tasks.contracts.release import RegisteredProgram
from tasks.contracts.training import CandidateModel, CompressedModel, TrainedModel
from tasks.evaluation.config import BaselineModelConfig, EvaluationConfig
from tasks.kernel.retry_policy import RETRIED, ByContent
from tasks.kernel.settings import Settings

TIMEOUT_S = 1800
_KEPT: dict[str, Any] = {
    **RETRIED,
    "timeout_seconds": TIMEOUT_S,
    "persist_result": True,
    "result_serializer": "json",
    "cache_policy": ByContent(task_file=__file__),
}


@task(name="fit-baseline-model", task_run_name="fit-baseline-model-{splits.train.slug}", **_KEPT)
def fit_baseline_model(
    dataset: ValidatedDataset, splits: DataSplits, config: BaselineModelConfig
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
    name="check-test-window",
    task_run_name="check-test-{splits.test.slug}",
    **RETRIED,
    timeout_seconds=TIMEOUT_S,
    cache_policy=NO_CACHE,
)
def check_test_window(
    dataset: ValidatedDataset, splits: DataSplits, config: EvaluationConfig
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
    trained: CandidateModel,
    dataset: ValidatedDataset,
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
    create_table_artifact(
        table=metric_rows(report), key="evaluation-metrics", description=f"Test {report.window}"
    )
    create_table_artifact(
        table=slice_rows(report), key="evaluation-slices", description="Quality by slice"
    )
    create_markdown_artifact(judgement(report), key="evaluation")
    return report


@task(name="score-window", task_run_name="score-v{model.version.version}-{window.slug}", **_KEPT)
def score_model_window(
    model: RegisteredProgram,
    dataset: ValidatedDataset,
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
    name="judge-served",
    task_run_name="judge-served-{served.dataset.snapshot.window.slug}",
    **_KEPT,
)
def judge_served_window(served: ServedWindow, config: EvaluationConfig) -> ScoredWindow:
    """Judge the scores that were served on the rows whose label is known by now.

    Safe to retry: it only reads artifacts.
    """
    from tasks.evaluation.judge import judge_served

    return judge_served(served, config, Settings.from_environment().store)


@task(name="compare-previous", task_run_name="compare-previous-{current.window.slug}", **_KEPT)
def compare_previous(
    previous: ScoredWindow, current: ScoredWindow, dataset: ValidatedDataset
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
    student: CompressedModel,
    parent: RegisteredProgram,
    distilled: TrainedModel | None,
    control: TrainedModel,
    dataset: ValidatedDataset,
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


def metric_rows(report: EvaluationReport) -> list[dict[str, str]]:
    """One row a metric: the model and the baseline model, with intervals."""
    of_baseline_model = dict(report.baseline_model)
    return [
        {
            "metric": name.replace("_", " "),
            "model": shown(metric),
            "baseline model": shown(of_baseline_model[name]),
        }
        for name, metric in report.overall
        if isinstance(metric, Metric)
    ]


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
                name: shown(metrics.primary),
                ratio: shown(second) if second else "",
            }
        )
    skipped = {"rows": "", name: "not judged", ratio: ""}
    return judged + [{"slice": text, **skipped} for text in report.skipped_slices]


def judgement(report: EvaluationReport) -> str:
    """The judgement in a few lines of markdown."""
    overall, name = report.overall, report.overall.primary_name
    lines = [
        f"**{name} {shown(overall.primary)}** on {overall.num_rows:,} rows of {report.window}. "
        "Brackets hold 95 % intervals.",
        "",
        f"Baseline model: {report.baseline_model_name}, {name} "
        f"{shown(report.baseline_model.primary)}.",
        "",
        *(
            f"- minus {part.against.replace('yardstick', 'baseline model')}: {name} "
            f"{shown(part.primary, signed=True)}, {part.error_name} "
            f"{shown(part.error, signed=True)}"
            for part in report.comparisons
        ),
    ]
    return "\n".join(lines)


def shown(metric: Metric, *, signed: bool = False) -> str:
    """A metric with its interval, such as `0.751 [0.733, 0.769]`."""
    sign = "+" if signed else ""
    return f"{metric.value:{sign}.4f} [{metric.low:{sign}.4f}, {metric.high:{sign}.4f}]"
