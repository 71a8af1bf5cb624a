"""A rising map of a model's scores, fitted to labels; and whether it helped, beyond doubt.

Of a classification Platt scaling: P(label = 1) = sigmoid(slope * logit + intercept), with targets
a little inside 0 and 1 that stand for a prior on each side (Platt, "Probabilistic outputs for
support vector machines", 1999). Of a regression a straight line by least squares.

Standard errors take all rows of a day as one observation (sandwich estimator: Liang and Zeger,
"Longitudinal data analysis using generalized linear models", 1986).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit

from tasks.contracts import evaluation
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import AUC_NAME, R2_NAME, DatasetSchema
from tasks.evaluation.config import RecalibrationConfig
from tasks.evaluation.scoring import SCORE, labelled, utc_times
from tasks.kernel.settings import ArtifactStore
from tasks.stats.bootstrap import number_days

Float64Array = NDArray[np.float64]
LOWEST_PROBABILITY = 1e-7  # a 32-bit score of exactly 0 or 1 has a finite logit
ENOUGH = 1e-10
SURELY = 1.96  # standard errors on either side of a 95 % interval


@dataclass(frozen=True)
class Line:
    """A fitted line and the standard errors of its two numbers."""

    slope: float
    intercept: float
    slope_error: float
    intercept_error: float


def fit_map(
    labels: NDArray[Any],
    scores: NDArray[np.floating[Any]],
    days: NDArray[np.intp],
    window: TimeWindow,
    config: RecalibrationConfig,
    *,
    is_number: bool,
) -> evaluation.FitOutcome:
    """Fit a map to the labelled rows of a window; a sentence instead where none should be used.

    Args:
        labels: 0 or 1, or numbers, shape (rows,).
        scores: the model's probabilities, or predictions, shape (rows,).
        days: number of each row's day, shape (rows,).
        window: of the rows, for the record.
        config: the fewest rows.
        is_number: of a regression.
    """
    truth = labels.astype(np.float64)
    refusal = _why_not_fitted(truth, scores, window, config, is_number=is_number)
    if refusal is not None:
        return evaluation.FitOutcome(fit=None, refusal=refusal)
    line = fit_line(truth, scores, days) if is_number else fit_platt(truth, logits(scores), days)
    lowest = line.slope - SURELY * line.slope_error
    if not lowest > 0:
        return evaluation.FitOutcome(
            fit=None,
            refusal=f"the fitted slope is {line.slope:.3f} with a standard error of "
            f"{line.slope_error:.3f} in {window}, not surely above 0: higher scores do not mean "
            "higher labels any more, and no map mends a ranking. Retrain instead",
        )
    fit = evaluation.MapFit(
        map=evaluation.Calibrator(slope=line.slope, intercept=line.intercept),
        slope_error=line.slope_error,
        intercept_error=line.intercept_error,
        window=window,
        num_rows=len(truth),
        num_positives=None if is_number else int(truth.sum()),
    )
    return evaluation.FitOutcome(fit=fit)


def logits(scores: NDArray[np.floating[Any]]) -> Float64Array:
    """Log odds of probabilities, which are kept a little off 0 and 1."""
    p = np.clip(scores.astype(np.float64), LOWEST_PROBABILITY, 1 - LOWEST_PROBABILITY)
    return np.log(p) - np.log1p(-p)


def fit_platt(labels: Float64Array, logit: Float64Array, days: NDArray[np.intp]) -> Line:
    """Platt scaling.

    Args:
        labels: 0 or 1, both present, shape (rows,).
        logit: of the scores, not all equal, shape (rows,).
        days: number of each row's day, shape (rows,).
    """
    positives = labels.sum()
    high = (positives + 1) / (positives + 2)
    low = 1 / (len(labels) - positives + 2)
    targets = np.where(labels > 0, high, low)
    middle, spread = logit.mean(), logit.std()  # Newton's steps are well conditioned on this scale
    inputs = np.column_stack([(logit - middle) / spread, np.ones_like(logit)])

    def loss(weights: Float64Array) -> float:
        total = inputs @ weights
        return float(np.mean(np.logaddexp(0, total) - targets * total))

    def gradient(weights: Float64Array) -> Float64Array:
        descent: Float64Array = inputs.T @ (expit(inputs @ weights) - targets) / len(labels)
        return descent

    def curvature(weights: Float64Array) -> Float64Array:
        p = expit(inputs @ weights)
        curved: Float64Array = inputs.T @ (inputs * (p * (1 - p))[:, None]) / len(labels)
        return curved

    found = minimize(
        loss, np.array([spread, middle]), jac=gradient, hess=curvature, method="trust-exact",
        options={"gtol": ENOUGH},
    )  # fmt: skip
    residuals = (expit(inputs @ found.x) - targets)[:, None]
    bread = np.linalg.inv(len(labels) * curvature(found.x))
    return _unscaled(found.x, _sandwich(inputs * residuals, bread, days), middle, spread)


def fit_line(labels: Float64Array, scores: NDArray[Any], days: NDArray[np.intp]) -> Line:
    """A straight line by least squares: label = slope * score + intercept.

    Args:
        labels: numbers, shape (rows,).
        scores: predictions, not all equal, shape (rows,).
        days: number of each row's day, shape (rows,).
    """
    x = scores.astype(np.float64)
    middle, spread = x.mean(), x.std()
    inputs = np.column_stack([(x - middle) / spread, np.ones_like(x)])
    bread = np.linalg.inv(inputs.T @ inputs)
    weights = bread @ (inputs.T @ labels)
    residuals = (inputs @ weights - labels)[:, None]
    return _unscaled(weights, _sandwich(inputs * residuals, bread, days), middle, spread)


def _why_not_fitted(
    labels: Float64Array,
    scores: NDArray[Any],
    window: TimeWindow,
    config: RecalibrationConfig,
    *,
    is_number: bool,
) -> str | None:
    rows, what = len(labels), f"{window} has {len(labels):,} labelled rows"
    if rows < config.min_rows:
        return (
            f"{what}, expected at least {config.min_rows:,} to fit a map of the scores to. Nothing "
            "was fitted; wait for more labels, or retrain"
        )
    positives = int(np.count_nonzero(labels))
    if not is_number and min(positives, rows - positives) < config.min_positives:
        return (
            f"{what}, {positives:,} of them with label 1; expected at least "
            f"{config.min_positives:,} of either label. Nothing was fitted; wait for more labels"
        )
    if np.ptp(labels) == 0 or np.ptp(scores) == 0:
        kind = "labels" if np.ptp(labels) == 0 else "scores"
        return f"{what}, whose {kind} are all the same. Nothing was fitted; retrain instead"
    return None


def _unscaled(
    weights: Float64Array, covariance: Float64Array, middle: float, spread: float
) -> Line:
    """The line over the inputs as they were, from that over the standardised ones."""
    back = np.array([[1 / spread, 0.0], [-middle / spread, 1.0]])
    slope, intercept = back @ weights
    errors = np.sqrt(np.diag(back @ covariance @ back.T))
    return Line(float(slope), float(intercept), float(errors[0]), float(errors[1]))


def _sandwich(scores: NDArray[Any], bread: NDArray[Any], days: NDArray[np.intp]) -> Float64Array:
    """Covariance of two weights from each row's gradient, shape (rows, 2), summed by day."""
    by_day = np.column_stack([np.bincount(days, scores[:, k]) for k in range(scores.shape[1])])
    covariance: Float64Array = bread @ (by_day.T @ by_day) @ bread
    return covariance


def fit_scored(
    scored: evaluation.ScoredWindow,
    columns: DatasetSchema,
    config: RecalibrationConfig,
    store: ArtifactStore,
) -> evaluation.FitOutcome:
    """Fit a map to the labelled rows of a scored window.

    Raises:
        ArtifactError: the scores are absent or damaged.
    """
    rows = labelled(scored, columns, store)
    return fit_map(
        rows[columns.label].to_numpy(np.float64),
        rows[SCORE].to_numpy(),
        number_days(utc_times(rows, columns.event_time))[0],
        scored.window,
        config,
        is_number=columns.task == "regression",
    )


Rule = Callable[[evaluation.Metric], bool]
MAX_RANK_CHANGE = 1e-4
"""AUC that a rising map may move: scores that 32 bits hold apart may meet, and the reverse."""


def why_no_gain(evaluation: evaluation.EvaluationReport, source: int) -> str | None:
    """Why the recalibrated model is no better than its source, as a sentence; None where it is.

    Both are judged on the same later rows and the same bootstrap draws. Of a classification log
    loss, Brier score and calibration error must each be lower by the whole 95 % interval, and the
    AUC be the same; of a regression the RMSE must be lower and R2 higher.

    Args:
        evaluation: of the recalibrated model.
        source: number of the version that it was made from.
    """
    found = [c for c in evaluation.comparisons if c.against == f"champion:{source}"]
    if len(found) != 1:
        seen = ", ".join(c.against for c in evaluation.comparisons)
        return (
            f"version {source} was mapped, and the evaluation compares with {seen}: another "
            "version became the champion in between. Nothing was registered; check its drift"
        )
    wanting = [
        f"{name} {_shown(change)}"
        for name, change, is_better in _changes(found[0])
        if not (change is not None and is_better(change))
    ]
    if not wanting:
        return None
    return (
        f"on {evaluation.overall.num_rows:,} rows of {evaluation.window} the new map does not help "
        f"beyond doubt: {'; '.join(wanting)}. Nothing was registered; retrain if scores stay wrong"
    )


def describe_changes(evaluation: evaluation.EvaluationReport, source: int) -> list[str]:
    """What the map changed on the rows of an evaluation, a line each."""
    found = [c for c in evaluation.comparisons if c.against == f"champion:{source}"]
    return [f"{name} {_shown(change)}" for part in found for name, change, _ in _changes(part)]


def _changes(comparison: evaluation.Comparison) -> list[tuple[str, evaluation.Metric | None, Rule]]:
    rules: list[tuple[str, str, Rule]] = [
        ("log loss", "log_loss_difference", lambda change: change.high < 0),
        ("Brier score", "brier_difference", lambda change: change.high < 0),
        ("calibration error", "calibration_error_difference", lambda change: change.high < 0),
        (AUC_NAME, "auc_difference", lambda change: abs(change.value) <= MAX_RANK_CHANGE),
    ]
    if not isinstance(comparison, evaluation.PairedComparison):
        rules = [
            ("RMSE", "rmse_difference", lambda change: change.high < 0),
            (R2_NAME, "r2_difference", lambda change: change.low > 0),
        ]
    return [(name, getattr(comparison, field), rule) for name, field, rule in rules]


def _shown(metric: evaluation.Metric | None) -> str:
    return "is not known" if metric is None else f"changed by {metric:+.4f}"


def announcement(
    calibration: evaluation.Calibration,
    evaluation: evaluation.EvaluationReport,
    refusal: str | None,
) -> str:
    """What was fitted, what it changed on later rows, and whether it is kept.

    Args:
        calibration: the map, and where it comes from.
        evaluation: of the recalibrated model.
        refusal: why it is not kept; None where it is.
    """
    fit, whole = calibration.fit, calibration.whole_map
    positives = "" if fit.num_positives is None else f", {fit.num_positives:,} with label 1"
    kept = "**Kept.** The scores mean what they say, as far as these rows can tell."
    lines = [
        f"**Not kept.** {refusal}" if refusal else kept,
        "",
        f"- slope {fit.map.slope:.4f} ± {fit.slope_error:.4f}",
        f"- intercept {fit.map.intercept:+.4f} ± {fit.intercept_error:.4f}",
        f"- fitted to {fit.num_rows:,} labelled rows of {fit.window}{positives}",
        f"- from the network's output {whole.slope:.4f} x {whole.intercept:+.4f}",
        *(f"- {line}" for line in describe_changes(evaluation, calibration.source.version)),
    ]
    return "\n".join(lines) + "\n"
