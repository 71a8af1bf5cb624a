"""Prefect tasks of the evaluation room."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from tasks.contracts import (
    DataSplits,
    EvaluationReport,
    Metric,
    MetricSet,
    RegisteredProgram,
    ScoredWindow,
    TimeWindow,
    TrainedModel,
    ValidatedDataset,
    Yardstick,
)
from tasks.evaluation.config import EvaluationConfig, YardstickConfig
from tasks.retry_policy import NUM_RETRIES, RETRY_DELAYS_S, RETRY_JITTER, ByContent, only_transient
from tasks.settings import Settings

TIMEOUT_S = 1800


@task(
    name="fit-yardstick",
    task_run_name="fit-yardstick-{splits.train.slug}",
    retries=NUM_RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_jitter_factor=RETRY_JITTER,
    retry_condition_fn=only_transient,
    timeout_seconds=TIMEOUT_S,
    persist_result=True,
    result_serializer="json",
    cache_policy=ByContent(task_file=__file__),
)
def fit_yardstick(
    dataset: ValidatedDataset, splits: DataSplits, config: YardstickConfig
) -> Yardstick:
    """Fit gradient boosting on the training window and score the test window with it.

    Safe to retry: the scores appear whole, under a key of their content, or not at all.

    Raises:
        DataContractError: a window has no rows, or its labels are not 0 and 1. Not retried.
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.evaluation.yardstick import score_yardstick

    return score_yardstick(dataset, splits, config, Settings.from_environment().store)


@task(
    name="judge-candidate",
    task_run_name="judge-{trained.splits.test.slug}",
    retries=NUM_RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_jitter_factor=RETRY_JITTER,
    retry_condition_fn=only_transient,
    timeout_seconds=TIMEOUT_S,
    persist_result=True,
    result_serializer="json",
    cache_policy=ByContent(task_file=__file__),
)
def judge_candidate(
    trained: TrainedModel,
    dataset: ValidatedDataset,
    rival: RegisteredProgram | None,
    yardstick: Yardstick,
    config: EvaluationConfig,
) -> EvaluationReport:
    """Judge a trained model on its test window, against the yardstick and the champion.

    Safe to retry: it reads artifacts and writes one more, whole or not at all.

    Raises:
        DataContractError: the test window cannot be judged, or a program does not give one
            probability a row. Not retried.
        StorageError: the disk refused a write. Not retried.
    """
    from tasks.evaluation.judge import judge_model

    store = Settings.from_environment().store
    report = judge_model(trained, dataset, rival, yardstick, config, store)
    create_table_artifact(
        table=metric_rows(report), key="evaluation-metrics", description=f"Test {report.window}"
    )
    create_table_artifact(
        table=slice_rows(report), key="evaluation-slices", description="AUC by slice"
    )
    create_markdown_artifact(judgement(report), key="evaluation")
    return report


@task(
    name="score-window",
    task_run_name="score-v{model.version.version}-{window.slug}",
    retries=NUM_RETRIES,
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_jitter_factor=RETRY_JITTER,
    retry_condition_fn=only_transient,
    timeout_seconds=TIMEOUT_S,
    persist_result=True,
    result_serializer="json",
    cache_policy=ByContent(task_file=__file__),
)
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


def metric_rows(report: EvaluationReport) -> list[dict[str, str]]:
    """One row a metric: the model and the yardstick, with intervals."""
    names = [n for n, field in MetricSet.model_fields.items() if field.annotation is Metric]
    return [
        {
            "metric": name.replace("_", " "),
            "model": shown(getattr(report.overall, name)),
            "yardstick": shown(getattr(report.yardstick, name)),
        }
        for name in names
    ]


def slice_rows(report: EvaluationReport) -> list[dict[str, str]]:
    """One row a judged slice; then the skipped ones, with the reason."""
    judged = [
        {
            "slice": f"{part.column}={part.value}",
            "rows": f"{part.metrics.num_rows:,}",
            "base rate": f"{part.metrics.base_rate:.3f}",
            "AUC": shown(part.metrics.auc),
            "Brier": shown(part.metrics.brier),
        }
        for part in report.slices
    ]
    skipped = [
        {"slice": text, "rows": "", "base rate": "", "AUC": "not judged", "Brier": ""}
        for text in report.skipped_slices
    ]
    return judged + skipped


def judgement(report: EvaluationReport) -> str:
    """The judgement in a few lines of markdown."""
    overall = report.overall
    lines = [
        f"**AUC {shown(overall.auc)}** on {overall.num_rows:,} rows of {report.window}, base rate "
        f"{overall.base_rate:.3f}. Brackets hold 95 % intervals.",
        "",
        f"Yardstick: {report.yardstick_name}, AUC {shown(report.yardstick.auc)}.",
        "",
        *(
            f"- minus {part.against}: AUC {shown(part.auc_difference, signed=True)}, Brier "
            f"{shown(part.brier_difference, signed=True)}"
            for part in report.comparisons
        ),
    ]
    return "\n".join(lines)


def shown(metric: Metric, *, signed: bool = False) -> str:
    """A metric with its interval, such as `0.751 [0.733, 0.769]`."""
    sign = "+" if signed else ""
    return f"{metric.value:{sign}.4f} [{metric.low:{sign}.4f}, {metric.high:{sign}.4f}]"
