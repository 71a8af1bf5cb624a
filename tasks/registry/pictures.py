"""Pictures of one run, drawn without pyplot: no global state, no display."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.contracts.evaluation import EvaluationReport, MetricSet, RegressionMetrics
from tasks.kernel.errors import refused_writes_explained

BLUE, ORANGE, GREY = "#1f5fa8", "#d97706", "#8a8f98"
DOTS_PER_INCH = 110
QUALITY = "quality.png"


def draw_pictures(evaluation: EvaluationReport, folder: Path) -> None:
    """Write how good the model is on the test rows; what it learnt MLflow draws by its metrics.

    Raises:
        StorageError: the disk refused.
    """
    figure = draw_quality(evaluation)
    with refused_writes_explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / QUALITY, dpi=DOTS_PER_INCH)


def draw_quality(evaluation: EvaluationReport) -> Figure:
    """ROC and calibration of the test rows; of a regression labels by prediction, and errors."""
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
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


def _finish(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set(xlabel=x, ylabel=y)
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
