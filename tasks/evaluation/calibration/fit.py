"""Fitting a rising map of a model's scores to labels.

Of a classification Platt scaling: P(label = 1) = sigmoid(slope * logit + intercept), with targets
a little inside 0 and 1 that stand for a prior on each side (Platt, "Probabilistic outputs for
support vector machines", 1999). Of a regression a straight line by least squares.

Standard errors take all rows of a day as one observation (sandwich estimator: Liang and Zeger,
"Longitudinal data analysis using generalized linear models", 1986).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit

from tasks.contracts.base import TimeWindow
from tasks.contracts.data import DatasetSchema
from tasks.contracts.evaluation import Calibrator, FitOutcome, MapFit, ScoredWindow
from tasks.evaluation.config import RecalibrationConfig
from tasks.evaluation.scoring import SCORE, utc_times
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
) -> FitOutcome:
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
        return FitOutcome(fit=None, refusal=refusal)
    line = fit_line(truth, scores, days) if is_number else fit_platt(truth, logits(scores), days)
    lowest = line.slope - SURELY * line.slope_error
    if not lowest > 0:
        return FitOutcome(
            fit=None,
            refusal=f"the fitted slope is {line.slope:.3f} with a standard error of "
            f"{line.slope_error:.3f} in {window}, not surely above 0: higher scores do not mean "
            "higher labels any more, and no map mends a ranking. Retrain instead",
        )
    fit = MapFit(
        map=Calibrator(slope=line.slope, intercept=line.intercept),
        slope_error=line.slope_error,
        intercept_error=line.intercept_error,
        window=window,
        num_rows=len(truth),
        num_positives=None if is_number else int(truth.sum()),
    )
    return FitOutcome(fit=fit)


def logits(scores: NDArray[np.floating[Any]]) -> Float64Array:
    """Log odds of probabilities, which are kept a little off 0 and 1."""
    p = np.clip(scores.astype(np.float64), LOWEST_PROBABILITY, 1 - LOWEST_PROBABILITY)
    odds: Float64Array = np.log(p) - np.log1p(-p)
    return odds


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
    fewest = min(positives, rows - positives)
    if not is_number and fewest < config.min_positives:
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
    scored: ScoredWindow, columns: DatasetSchema, config: RecalibrationConfig, store: ArtifactStore
) -> FitOutcome:
    """Fit a map to the labelled rows of a scored window.

    Raises:
        ArtifactError: the scores are absent or damaged.
    """
    rows: pd.DataFrame = pq.read_table(store.path(scored.scores)).to_pandas()
    rows = rows[rows[columns.label].notna()]
    return fit_map(
        rows[columns.label].to_numpy(np.float64),
        rows[SCORE].to_numpy(),
        number_days(utc_times(rows, columns.event_time))[0],
        scored.window,
        config,
        is_number=columns.task == "regression",
    )
