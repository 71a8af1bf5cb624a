"""A sudden change, which a window of weeks dilutes: the newest days by themselves.

They are compared with the reference by the distances of whole windows, Kolmogorov-Smirnov of a
number and total variation of a category (Kifer, Ben-David and Gehrke, 2004, "Detecting change in
data streams"). Rows of one day resemble each other, and a season comes and goes. So the limit of a
feature is the largest distance of equally many days in a row within the reference itself: days of
the same season and weekday, as far as the reference has them.
"""

from collections.abc import Mapping

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from tasks.evaluation.drift.slow import MIN_DAY_SHARE, MIN_REFERENCE_DAYS
from tasks.evaluation.drift.statistics import Histogram
from tasks.kernel.values import first_of
from tasks.stats.shift import distance, shares

NUM_DAYS = 4
MIN_EXCESS = 0.2
"""Of the rows, beyond what the reference had; chosen on permuted days (decision record 0165)."""
MAX_NAMED = 5


def find_sudden(histograms: Mapping[str, Histogram]) -> dict[str, float] | None:
    """Features that moved in the newest days, and how far beyond any days of the reference.

    Args:
        histograms: rows by day and bin, days in order, by feature.

    Returns:
        Distances beyond the largest of the reference, 0 to 1, the largest first: those above
        `MIN_EXCESS`. None where either window has too few whole days.
    """
    found = {}
    for name, histogram in histograms.items():
        least = MIN_DAY_SHARE * np.median(histogram.reference.sum(axis=1))
        latest = histogram.current[-NUM_DAYS - 1 :]  # the last one may be a part of a day
        before, now = (part[part.sum(axis=1) >= least] for part in (histogram.reference, latest))
        if len(before) < MIN_REFERENCE_DAYS or len(now) < NUM_DAYS:
            return None
        usual, runs = shares(before.sum(axis=0)), sliding_window_view(before, NUM_DAYS, axis=0)
        known, newest = (
            distance(shares(counts) - usual, ordered=histogram.ordered)
            for counts in (runs.sum(axis=-1), now[-NUM_DAYS:].sum(axis=0))
        )
        if (excess := float(newest - known.max())) > MIN_EXCESS:
            found[name] = excess
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def describe(sudden: Mapping[str, float] | None) -> str:
    """What the newest days showed, in a sentence."""
    if sudden is None:
        return (
            f"The newest days were not compared by themselves: this takes {MIN_REFERENCE_DAYS} "
            f"whole days of the reference and the newest {NUM_DAYS} of the window."
        )
    told = f"than any {NUM_DAYS} days in a row of it, by more than {MIN_EXCESS} of the rows"
    if not sudden:
        return f"No feature lies further from the reference in the newest {NUM_DAYS} days {told}."
    named = [f"{name} {excess:.2f}" for name, excess in sudden.items()]
    return (
        f"Sudden change: the newest {NUM_DAYS} days of {len(sudden)} features lie further from the "
        f"reference {told}: {first_of(named, MAX_NAMED, '; ')}."
    )
