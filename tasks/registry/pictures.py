"""Pictures of one run, drawn without pyplot: no global state, no display."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tasks.contracts.evaluation import CurvePoint, EvaluationReport, MetricSet, RegressionMetrics
from tasks.contracts.training import CandidateModel, TrainedModel
from tasks.kernel.errors import refused_writes_explained

BLUE, ORANGE, GREY = "#1f5fa8", "#d97706", "#8a8f98"
DOTS_PER_INCH = 110
Place = Literal["best", "lower right", "upper right", "upper left"]


def draw_pictures(trained: CandidateModel, evaluation: EvaluationReport, folder: Path) -> None:
    """Write pictures into `folder`: what was learnt, and how good it is on the test rows.

    `learning-curve.png` where something was trained; of a classification `roc-pr.png` and
    `calibration.png`, of a regression `observed.png` and `residuals.png`.

    Raises:
        StorageError: the disk refused.
    """
    figures = {}
    if isinstance(trained, TrainedModel):
        figures["learning-curve"] = draw_learning_curve(trained)
    if isinstance(evaluation.overall, MetricSet):
        figures["roc-pr"] = draw_roc_and_pr(evaluation, evaluation.overall)
        figures["calibration"] = draw_calibration(evaluation, evaluation.overall)
    else:
        figures["observed"] = draw_observed(evaluation, evaluation.overall)
        figures["residuals"] = draw_residuals(evaluation, evaluation.overall)
    with refused_writes_explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.png", dpi=DOTS_PER_INCH)


def draw_learning_curve(trained: TrainedModel) -> Figure:
    """Losses and validation AUC (or R2) by epoch, the kept epoch marked."""
    figure, (left, right) = _two_axes()
    epochs = [e.epoch for e in trained.epochs]
    left.plot(epochs, [e.train_loss for e in trained.epochs], ".-", color=GREY, label="training")
    validation = [e.validation_loss for e in trained.epochs]
    left.plot(epochs, validation, ".-", color=BLUE, label="validation")
    right.plot(epochs, [e.quality for e in trained.epochs], ".-", color=BLUE)
    for axes in (left, right):
        axes.axvline(trained.best_epoch, color=ORANGE, linestyle=":", label="kept epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    name = trained.epochs[0].quality_name
    is_number = trained.columns.task == "regression"
    _finish(left, "Loss", "epoch", "Huber loss" if is_number else "cross-entropy (nats)")
    _finish(right, f"Validation {name}", "epoch", name)
    return figure


def draw_roc_and_pr(evaluation: EvaluationReport, overall: MetricSet) -> Figure:
    """ROC and precision-recall curves of the test rows, with what guessing would give."""
    figure, (left, right) = _two_axes()
    _draw_curve(left, evaluation.roc, f"AUC {overall.auc.value:.3f}")
    left.plot([0, 1], [0, 1], color=GREY, linestyle=":", label="guessing")
    _draw_curve(right, evaluation.precision_recall, f"PR-AUC {overall.pr_auc.value:.3f}")
    right.axhline(overall.base_rate, color=GREY, linestyle=":", label="guessing")
    for axes in (left, right):
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
    _finish(left, "ROC", "false positive rate", "true positive rate", place="lower right")
    _finish(right, "Precision and recall", "recall", "precision", place="upper right")
    return figure


def draw_calibration(evaluation: EvaluationReport, overall: MetricSet) -> Figure:
    """Observed rate against mean score by bin; a point's area is its share of the rows."""
    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    axes = figure.subplots()
    points = evaluation.calibration
    most = max((p.weight for p in points), default=0.0) or 1.0
    _draw_curve(axes, points, f"error {overall.calibration_error.value:.3f}")
    axes.scatter(
        [p.x for p in points],
        [p.y for p in points],
        s=[10 + 110 * p.weight / most for p in points],
        color=BLUE,
        alpha=0.45,
        linewidths=0,
    )
    limit = 1.05 * max([p.x for p in points] + [p.y for p in points], default=1.0)
    axes.plot([0, limit], [0, limit], color=GREY, linestyle=":", label="perfect")
    axes.set_xlim(0, limit)
    axes.set_ylim(0, limit)
    _finish(axes, "Calibration", "mean score", "observed rate", place="upper left")
    return figure


def draw_observed(evaluation: EvaluationReport, overall: RegressionMetrics) -> Figure:
    """Labels by prediction: the mean of each bin, and where the middle four fifths lie."""
    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    axes = figure.subplots()
    bands = evaluation.observed
    x = [b.x for b in bands]
    axes.fill_between(x, [b.low for b in bands], [b.high for b in bands], color=BLUE, alpha=0.2)
    axes.plot(x, [b.mean for b in bands], ".-", color=BLUE, label=f"R² {overall.r2.value:.3f}")
    ends = [min(x), max(x)]
    axes.plot(ends, ends, color=GREY, linestyle=":", label="perfect")
    _finish(axes, "Observed", _with_unit("predicted", overall), "observed", place="upper left")
    return figure


def draw_residuals(evaluation: EvaluationReport, overall: RegressionMetrics) -> Figure:
    """How many test rows have which error."""
    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    axes = figure.subplots()
    classes = evaluation.residuals
    label = f"RMSE {overall.rmse.value:.4g}"
    bars = ([c.x for c in classes], [c.weight for c in classes], [c.y for c in classes])
    axes.bar(*bars, color=BLUE, alpha=0.7, label=label)
    axes.axvline(overall.bias.value, color=ORANGE, linestyle=":", label="mean error")
    _finish(axes, "Errors", _with_unit("predicted minus observed", overall), "rows")
    return figure


def _with_unit(words: str, overall: RegressionMetrics) -> str:
    return f"{words} ({overall.unit})" if overall.unit else words


def _two_axes() -> tuple[Figure, tuple[Axes, Axes]]:
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    return figure, (left, right)


def _draw_curve(axes: Axes, points: tuple[CurvePoint, ...], label: str) -> None:
    axes.plot([p.x for p in points], [p.y for p in points], color=BLUE, label=label)


def _finish(axes: Axes, title: str, x: str, y: str, place: Place = "best") -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc=place)
