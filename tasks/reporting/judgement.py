"""Quality in the words and figures of either task, and the pictures of a regression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.contracts.drift import DriftReport
from tasks.contracts.evaluation import (
    EvaluationReport,
    Metric,
    MetricSet,
    Quality,
    RegressionMetrics,
    SliceMetrics,
)
from tasks.contracts.run import RunRecord
from tasks.reporting.quantities import (
    MISSING,
    count,
    decimal,
    difference,
    estimate,
    interval,
    is_shown,
    percent,
)

DIGITS = ((1000.0, 0), (10.0, 1), (0.0, 3))
"""From which size on numbers have how many digits after the point."""


@dataclass(frozen=True)
class Cell:
    """One number of a table, with its interval."""

    value: str
    interval: str


@dataclass(frozen=True)
class Table:
    """Metrics of several models: `better` says in which direction."""

    headings: tuple[str, ...]
    better: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


def is_regression(record: RunRecord) -> bool:
    """Whether the model gives numbers and not probabilities."""
    return isinstance(record.evaluation.overall, RegressionMetrics)


def describe_outputs(record: RunRecord) -> str:
    """What the model gives, in a word."""
    return "predictions" if is_regression(record) else "scores"


def quality_table(record: RunRecord) -> Table:
    """Metrics of the candidate, the baseline model and, of a regression, the baseline."""
    report = record.evaluation
    models: list[tuple[str, Quality]] = [
        (f"candidate, version {record.version.version}", report.overall),
        (report.baseline_model_name, report.baseline_model),
    ]
    if report.baseline is not None:
        models.append((f"baseline, {report.baseline_name}", report.baseline))
    figures = _figures(report.overall)
    return Table(
        headings=tuple(name for name, _, _ in figures),
        better=tuple(better for _, better, _ in figures),
        rows=tuple(
            (name, tuple(_cell(metric) for _, _, metric in _figures(metrics)))
            for name, metrics in models
        ),
    )


def slice_table(parts: Sequence[SliceMetrics]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings after column and value, and one row of texts a slice."""
    headings: tuple[str, ...]
    rows = [(part.column, part.value, count(part.metrics.num_rows)) for part in parts]
    if not parts or isinstance(parts[0].metrics, MetricSet):
        headings = ("Rows", "Base rate", "AUC", "PR-AUC", "Brier score", "Calibration error")
    else:
        unit = parts[0].metrics.unit
        # The ratio first: the gate judges it, and the table may be wider than the page.
        headings = ("Rows", _with_unit("Mean label", unit), "RMSE ratio")
        headings += ("R²", "RMSE", "MAE", "Bias", "Skill")
    return headings, [row + _of_slice(part) for row, part in zip(rows, parts, strict=True)]


def _of_slice(part: SliceMetrics) -> tuple[str, ...]:
    metrics = part.metrics
    if isinstance(metrics, MetricSet):
        shown = (metrics.auc, metrics.pr_auc, metrics.brier, metrics.calibration_error)
        return (percent(metrics.base_rate), *map(estimate, shown))
    figures = _figures(metrics)
    return (
        sized(metrics.label_mean),
        *(
            f"{cell.value} {cell.interval}".strip()
            for cell in map(_cell, [part.error_ratio, *(m for _, _, m in figures)])
        ),
    )


def _figures(metrics: Quality) -> list[tuple[str, str, Metric | None]]:
    """Name, better direction and value of each metric."""
    if isinstance(metrics, MetricSet):
        return [
            ("AUC", "higher", metrics.auc),
            ("PR-AUC", "higher", metrics.pr_auc),
            ("Brier score", "lower", metrics.brier),
            ("Log loss", "lower", metrics.log_loss),
            ("Calibration error", "lower", metrics.calibration_error),
        ]
    return [
        ("R²", "higher", metrics.r2),
        ("RMSE", "lower", metrics.rmse),
        ("MAE", "lower", metrics.mae),
        ("Bias", "near 0", metrics.bias),
        ("Skill over baseline", "higher", metrics.skill),
    ]


def _cell(metric: Metric | None) -> Cell:
    if metric is None:
        return Cell(MISSING, "")
    digits = _digits(metric.value, metric.low, metric.high)
    return Cell(decimal(metric.value, digits), interval(metric, digits))


def _digits(*values: float) -> int:
    largest = max((abs(v) for v in values if is_shown(v)), default=0.0)
    return next(digits for least, digits in DIGITS if largest >= least)


def sized(value: float) -> str:
    """A number in the label's unit, with digits that fit its size."""
    return decimal(value, _digits(value))


def describe_labels(record: RunRecord) -> str:
    """What the labels are like, in a few words."""
    snapshot = record.dataset.snapshot
    if snapshot.label_summary is None:
        return f"{percent(snapshot.positive_rate)} positive"
    labels = snapshot.label_summary
    return (
        f"{with_unit(labels.mean, record)} on average, standard deviation {sized(labels.deviation)}"
    )


def describe_labels_at_length(record: RunRecord) -> str:
    """The same as part of a sentence about the rows, with what a label means."""
    snapshot = record.dataset.snapshot
    if snapshot.label_summary is None:
        positive = percent(snapshot.positive_rate)
        return f"{positive} of them are positive ({snapshot.label_definition})"
    labels = snapshot.label_summary
    return (
        f"it is {with_unit(labels.mean, record)} on average, from {sized(labels.low)} to "
        f"{sized(labels.high)} ({snapshot.label_definition})"
    )


def with_unit(value: float, record: RunRecord) -> str:
    """A number with the label's unit."""
    return f"{sized(value)} {record.dataset.snapshot.columns.unit}".strip()


def with_unit_of_errors(words: str, record: RunRecord) -> str:
    """Words about errors with their unit: the label's, or none for probabilities."""
    return _with_unit(words, _label_unit(record.evaluation))


def digits_of_errors(differences: Sequence[Metric], record: RunRecord) -> int:
    """Digits after the point of differences of errors: as many as fit their unit."""
    if not is_regression(record):
        return 4
    return _digits(*(bound for d in differences for bound in (d.value, d.low, d.high)))


def second_tile(record: RunRecord) -> tuple[str, str, str, str]:
    """Title, value, interval and note of what is told after the first metric."""
    report = record.evaluation
    overall = report.overall
    if isinstance(overall, MetricSet):
        error = overall.calibration_error
        told = "mean gap between a score and what came true"
        return "Calibration error", decimal(error.value), interval(error), told
    cell = _cell(overall.mae)
    if report.baseline is None or overall.skill is None:
        told = f"{overall.unit}; no baseline is named"
    else:
        baseline = sized(report.baseline.mae.value)
        told = f"{overall.unit}; the baseline has {baseline}, skill {estimate(overall.skill)}"
    return "Mean absolute error", cell.value, cell.interval, told.removeprefix("; ")


def slice_rank(metrics: Quality) -> float:
    """By what slices are put in order, the best highest."""
    return metrics.auc.value if isinstance(metrics, MetricSet) else -metrics.mae.value


def describe_skill(report: EvaluationReport) -> str:
    """What the model adds to the baseline, as a sentence; empty without one."""
    overall = report.overall
    if not isinstance(overall, RegressionMetrics) or overall.skill is None:
        return ""
    skill = overall.skill
    result = "errs less than" if skill.low > 0 else "errs as much as"
    result = "errs more than" if skill.high < 0 else result
    return (
        f"The model {result} the baseline {report.baseline_name}: skill {estimate(skill)}, the "
        "share of its squared error that is saved."
    )


def drift_figures(drift: DriftReport) -> list[tuple[str, str]]:
    """Name and value of what is told of the quality in both windows, once labels are known."""
    before, now = drift.reference_performance, drift.current_performance
    if now is None:
        return []
    name = now.primary_name
    told: list[tuple[str, str]] = []
    if before is not None:
        told.append((f"{name}, reference", estimate(before.primary)))
    told.append((f"{name}, current", estimate(now.primary)))
    change = drift.auc_change if isinstance(now, MetricSet) else drift.r2_change
    told.append((f"Change of {name}", difference(change, 3)))
    if drift.excess_brier_change is not None:
        told.append(("Change of excess Brier", difference(drift.excess_brier_change)))
    if drift.skill_change is not None:
        told.append(("Change of skill", difference(drift.skill_change, 3)))
    for which, metrics in (("reference", before), ("current", now)):
        if metrics is not None:
            told += _level(which, metrics)
    return told


def _level(which: str, metrics: Quality) -> list[tuple[str, str]]:
    if isinstance(metrics, MetricSet):
        return [(f"Positive, {which}", percent(metrics.base_rate))]
    error = _cell(metrics.mae)
    return [
        (f"Mean error, {which}", f"{error.value} {error.interval}"),
        (f"Mean label, {which}", sized(metrics.label_mean)),
    ]


def words(record: RunRecord) -> list[tuple[str, str]]:
    """The metrics' names on the page, and what they mean."""
    if not is_regression(record):
        return [
            (
                "AUC",
                "how often a positive row gets a higher score than a negative one; 0.5 is "
                "guessing, 1 is perfect",
            ),
            ("Brier score", "mean squared gap between score and outcome"),
            (
                "Calibration error",
                "mean gap between scores and observed rates, weighted by rows",
            ),
        ]
    return [
        (
            "R²",
            "share of the labels' variance that predictions explain; 1 is perfect",
        ),
        ("RMSE", "root of the mean squared error: large errors count most"),
        ("MAE", "mean absolute error"),
        ("Bias", "mean of prediction minus label"),
        ("Baseline", "a number known beforehand, taken as the prediction"),
        (
            "Skill",
            "share of the baseline's squared error that the model saves",
        ),
        (
            "RMSE ratio",
            "RMSE of a slice over that of baseline model or baseline there, if that errs less "
            "(or over an error that does no harm, where that is larger); a gate judges it",
        ),
    ]


def _label_unit(report: EvaluationReport) -> str:
    return report.overall.unit if isinstance(report.overall, RegressionMetrics) else ""


def with_label_unit(words: str, report: EvaluationReport) -> str:
    """Words followed by the label's unit, where it has one."""
    return _with_unit(words, _label_unit(report))


def _with_unit(words: str, unit: str) -> str:
    return f"{words}, {unit}" if unit else words
