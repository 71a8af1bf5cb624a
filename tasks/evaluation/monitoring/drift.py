"""Drift of sliding windows against the baseline, with the noise of the baseline itself.

A PSI needs something to compare with: even two clean weeks differ. So each window of the baseline
is compared with the rest of it, and the largest such PSI over all features and windows of a view,
times a factor, is the least that counts. The largest over all features corrects for their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.evaluation.monitoring.config import MonitoringConfig
from tasks.evaluation.monitoring.statistics import Binned, Floats
from tasks.stats.shift import distance, psi, shares

NOISE_FACTOR = 2.0
"""Times the PSI that windows of the baseline reach against the rest of it."""
MIN_KS = 0.2


@dataclass(frozen=True)
class WindowDrift:
    """One feature in one sliding window.

    Args:
        feature: its name.
        end_day: day after the window, counted from the start of the refreshed window.
        psi: population stability index against the baseline, nulls and zeros as bins of their own.
        ks: Kolmogorov-Smirnov distance over the bins.
        bound: PSI that would be drift.
    """

    feature: str
    end_day: int
    psi: float
    ks: float
    bound: float
    drifted: bool


def baseline_noise(counts: Floats, window_days: int) -> float:
    """Largest PSI of windows of the baseline, end to end, against the rest of it.

    Args:
        counts: rows by day and bin, shape (days, bins).
        window_days: days of a window.

    Returns:
        Infinity where the baseline holds fewer than two windows: nothing can be judged then.
    """
    starts = range(0, len(counts) - window_days + 1, window_days)
    if len(starts) < 2:
        return float("inf")
    total = counts.sum(axis=0)
    windows = [counts[start : start + window_days].sum(axis=0) for start in starts]
    return max(float(psi(total - part, part)) for part in windows)


def measure_drift(
    features: Sequence[Binned],
    baseline_days: tuple[int, int],
    ends: Sequence[int],
    config: MonitoringConfig,
) -> list[WindowDrift]:
    """Drift of every feature in each window that ends with one of `ends`.

    Args:
        features: binned features of one view.
        baseline_days: first day and day after the last, counted from the refreshed window's start.
        ends: days after the windows.
        config: lengths and bounds.
    """
    first, after = baseline_days
    in_baseline = [(f.days >= first) & (f.days < after) for f in features]
    references = [f.counts[mask] for f, mask in zip(features, in_baseline, strict=True)]
    noise = max((baseline_noise(c, config.window_days) for c in references), default=float("inf"))
    bound = max(config.min_psi, NOISE_FACTOR * noise)
    found = []
    for end in ends:
        for feature, reference in zip(features, references, strict=True):
            inside = (feature.days >= end - config.window_days) & (feature.days < end)
            current = feature.counts[inside].sum(axis=0)
            total = reference.sum(axis=0)
            if not current.sum() or not total.sum():
                continue
            index = float(psi(total, current))
            ks = float(distance(shares(current) - shares(total), ordered=True))
            drifted = bool(index > bound and ks > MIN_KS)
            found.append(WindowDrift(feature.feature, end, index, ks, bound, drifted))
    return found
