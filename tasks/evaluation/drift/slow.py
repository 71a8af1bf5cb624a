"""A change that is too slow or too small for one window: a sequential test of days.

Each day after the reference says how far scores and labels were apart. The test bets on larger
errors, and on scores that are too far apart for what the labels show (a slope below that of the
reference), and adds up what all days since the reference say; see `tasks.stats.sequential`.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from tasks.contracts.data import DatasetSchema
from tasks.contracts.drift import DayErrors, SlowChange
from tasks.contracts.evaluation import ScoredWindow
from tasks.evaluation.config import DriftConfig
from tasks.evaluation.drift.window import Float64Array
from tasks.evaluation.scoring import SCORE, labelled, utc_times
from tasks.kernel.settings import ArtifactStore
from tasks.stats.bootstrap import number_days
from tasks.stats.ranked import LOWEST_PROBABILITY
from tasks.stats.sequential import change_wealth

MIN_REFERENCE_DAYS = 28
MIN_DAY_SHARE = 0.5  # of the rows of the reference's median day; a part of a day is unlike a whole
BOUND = 2.0
"""Standard deviations of a day from which it counts no more: storms come in days, not in months."""
TOLERATED = 0.1  # standard deviations: the reference's own mean is known no better


def score_days(
    scored: ScoredWindow, columns: DatasetSchema, store: ArtifactStore
) -> tuple[DayErrors, ...]:
    """How far scores and labels of each UTC day were apart; none of several classes.

    Raises:
        ArtifactError: the scores are absent or damaged.
    """
    if columns.classes:
        return ()
    rows = labelled(scored, columns, store)
    times = utc_times(rows, columns.event_time)
    score, label = (rows[name].to_numpy(np.float64) for name in (SCORE, columns.label))
    parts = error_parts(label, score, columns.task == "classification")
    days, num_days = number_days(times)
    sizes = np.bincount(days, minlength=num_days)
    means = np.column_stack([np.bincount(days, part, num_days) for part in parts]) / sizes[:, None]
    return tuple(
        DayErrors(day=day, num_rows=size, bias=bias, error=error, slope=slope)
        for day, size, (bias, error, slope) in zip(
            np.unique(times.astype("datetime64[D]")).tolist(), sizes.tolist(), means, strict=True
        )
    )


def error_parts(
    label: Float64Array, score: Float64Array, is_class: bool
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Bias, error and slope of single rows; see `DayErrors`."""
    residual = label - score
    if not is_class:
        return residual, residual**2, residual * score
    inside = np.clip(score, LOWEST_PROBABILITY, 1 - LOWEST_PROBABILITY)
    excess = residual**2 - score * (1 - score)
    return residual, excess, residual * np.log(inside / (1 - inside))


def join_days(*windows: Iterable[DayErrors]) -> tuple[DayErrors, ...]:
    """The days of several windows in order; of a day that several have, the one with most rows."""
    found: dict[object, DayErrors] = {}
    for each in (day for window in windows for day in window):
        if each.day not in found or each.num_rows >= found[each.day].num_rows:
            found[each.day] = each
    return tuple(sorted(found.values(), key=lambda each: each.day))


def find_slow_change(
    reference: Sequence[DayErrors], days: Sequence[DayErrors], config: DriftConfig
) -> SlowChange | None:
    """Test the days after the reference, all together.

    Args:
        reference: days of the performance reference, in order.
        days: days that the model scored, in order; those of the reference and before do not count.
        config: the limit.

    Returns:
        What was found; None where either has too few days.
    """
    if len(reference) < MIN_REFERENCE_DAYS:
        return None
    least = MIN_DAY_SHARE * float(np.median([each.num_rows for each in reference]))
    whole = [each for each in reference if each.num_rows >= least]
    later = [each for each in days if each.day > reference[-1].day and each.num_rows >= least]
    if not later:
        return None
    values = directions(_table(whole), _table(later))
    wealth = change_wealth(np.clip((values - TOLERATED) / BOUND, -1, 1))
    is_found = wealth[-1] >= np.log(config.slow_change_days)
    return SlowChange(
        num_days=len(later),
        evidence=float(np.exp(min(wealth[-1], 700.0))),
        limit=config.slow_change_days,
        began=later[_begin(values)].day if is_found else None,
    )


def _table(days: Sequence[DayErrors]) -> Float64Array:
    return np.array([(each.bias, each.error, each.slope) for each in days])


def directions(reference: Float64Array, days: Float64Array) -> Float64Array:
    """Larger errors, and a lower slope than bias and error of the day let expect, shape (days, 2).

    Takes bias, error and slope of each day, shape (days, 3).
    In standard deviations of the reference's days. A day of storms moves all three numbers
    together, which the regression takes out; a stale model moves the slope alone.
    """
    centre, scale = reference.mean(axis=0), np.maximum(reference.std(axis=0, ddof=1), 1e-12)
    before, now = ((each - centre) / scale for each in (reference, days))
    weights = np.linalg.lstsq(before[:, :2], before[:, 2], rcond=0.1)[0]
    slopes = [each[:, 2] - each[:, :2] @ weights for each in (before, now)]
    return np.column_stack([now[:, 1], -slopes[1] / max(float(slopes[0].std(ddof=2)), 1e-12)])


def _begin(values: Float64Array) -> int:
    """Day from which the sum of either direction rose most (Page, 1954)."""
    sums = np.cumsum(np.clip(values, -BOUND, BOUND) - TOLERATED, axis=0)
    before = np.vstack([np.zeros(sums.shape[1]), sums[:-1]])
    begins = before.argmin(axis=0)
    rises = sums[-1] - before.min(axis=0)
    return int(begins[rises.argmax()])


def describe(change: SlowChange) -> str:
    """The test in a sentence."""
    days = f"{change.num_days} days since the reference"
    if change.began is None:
        return (
            f"No slow change: evidence {change.evidence:.3g} over the {days}, below the limit "
            f"{change.limit:g}."
        )
    return (
        f"Slow change: the model errs more, or its scores tell less, since about {change.began}; "
        f"evidence {change.evidence:.3g} over the {days}, which chance reaches at most once in "
        f"{change.limit:g} days."
    )
