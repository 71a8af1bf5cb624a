"""Pictures of one run, drawn without pyplot: no global state, no display."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tasks.contracts.evaluation import EvaluationReport, MetricSet, RegressionMetrics
from tasks.contracts.training import CandidateModel, TrainedModel
from tasks.kernel.errors import refused_writes_explained

BLUE, ORANGE, GREY = "#1f5fa8", "#d97706", "#8a8f98"
DOTS_PER_INCH = 110
LEARNING, QUALITY = "learning-curve.png", "quality.png"


def draw_pictures(trained: CandidateModel, evaluation: EvaluationReport, folder: Path) -> None:
    """Write what was learnt, where something was trained, and how good it is on the test rows.

    Raises:
        StorageError: the disk refused.
    """
    figures = {QUALITY: draw_quality(evaluation)}
    if isinstance(trained, TrainedModel):
        figures[LEARNING] = draw_learning_curve(trained)
    with refused_writes_explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            figure.savefig(folder / name, dpi=DOTS_PER_INCH)


def draw_learning_curve(trained: TrainedModel) -> Figure:
    """Losses and validation AUC (or R2) by epoch, the kept epoch marked."""
    figure, left, right = _two_axes()
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


def draw_quality(evaluation: EvaluationReport) -> Figure:
    """ROC and calibration of the test rows; of a regression labels by prediction, and errors."""
    figure, left, right = _two_axes()
    if isinstance(evaluation.overall, MetricSet):
        _draw_probabilities(left, right, evaluation, evaluation.overall)
    else:
        _draw_numbers(left, right, evaluation, evaluation.overall)
    return figure


def _draw_probabilities(
    left: Axes, right: Axes, evaluation: EvaluationReport, overall: MetricSet
) -> None:
    for axes, points, label, other in (
        (left, evaluation.roc, f"AUC {overall.auc.value:.3f}", "guessing"),
        (right, evaluation.calibration, f"error {overall.calibration_error.value:.3f}", "perfect"),
    ):
        axes.plot([p.x for p in points], [p.y for p in points], ".-", color=BLUE, label=label)
        reach = max([p.x for p in points] + [p.y for p in points], default=1.0)
        axes.plot([0, reach], [0, reach], color=GREY, linestyle=":", label=other)
    _finish(left, "ROC", "false positive rate", "true positive rate")
    _finish(right, "Calibration", "mean score", "observed rate")


def _draw_numbers(
    left: Axes, right: Axes, evaluation: EvaluationReport, overall: RegressionMetrics
) -> None:
    bands, classes = evaluation.observed, evaluation.residuals
    x = [b.x for b in bands]
    left.fill_between(x, [b.low for b in bands], [b.high for b in bands], color=BLUE, alpha=0.2)
    left.plot(x, [b.mean for b in bands], ".-", color=BLUE, label=f"R² {overall.r2.value:.3f}")
    left.plot([min(x), max(x)], [min(x), max(x)], color=GREY, linestyle=":", label="perfect")
    bars = ([c.x for c in classes], [c.weight for c in classes], [c.y for c in classes])
    right.bar(*bars, color=BLUE, alpha=0.7, label=f"RMSE {overall.rmse.value:.4g}")
    right.axvline(overall.bias.value, color=ORANGE, linestyle=":", label="mean error")
    unit = f" ({overall.unit})" if overall.unit else ""
    _finish(left, "Observed", f"predicted{unit}", "observed")
    _finish(right, "Errors", f"predicted minus observed{unit}", "rows")


def _two_axes() -> tuple[Figure, Axes, Axes]:
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    return figure, left, right


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set(xlabel=x, ylabel=y)
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
