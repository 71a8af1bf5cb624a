"""Count what online reads met: how fresh each view was, how old its values, how often reads failed.

One small object in the process, because a client library's counters cost a lock and a dictionary
look-up for each view and row. Its snapshot holds what a Prometheus collector, or anything else that
is scraped, needs: counters that only rise, and ages in cumulative classes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tasks.features.checks.reports import OnlineReadStatistics, ViewReadStatistics
from tasks.features.online.answer import LABELS, Freshness


class OnlineMetrics:
    """Counters of one reader since it was made. Safe to use from many threads.

    Args:
        backend: what the values are read through.
        views: names of the views, in the order of the arrays given to `record`.
        age_bounds_s: rising upper bounds of the age classes, in seconds.
    """

    def __init__(self, backend: str, views: Sequence[str], age_bounds_s: Sequence[float]) -> None:
        self._backend, self._views = backend, tuple(views)
        self._bounds = np.array(age_bounds_s, np.float64)
        self._lock = threading.Lock()
        self._reads = self._rows = self._failures = self._refusals = 0
        # A class is a state and a range of ages; the last age is "above all bounds, or none".
        self._counts = np.zeros((len(self._views), len(LABELS), len(self._bounds) + 1), np.int64)
        self._age_sums = np.zeros(len(self._views))
        self._offsets = np.arange(len(self._views))[:, None] * self._counts[0].size

    def record(self, state: NDArray[np.uint8], age_s: NDArray[np.float64]) -> None:
        """Count one read.

        Args:
            state: `Freshness` codes, shape (views, rows).
            age_s: ages in seconds, same shape; NaN where nothing is stored.
        """
        classes = np.searchsorted(self._bounds, age_s)  # NaN is sorted above all
        cells = self._offsets + state.astype(np.int64) * (len(self._bounds) + 1) + classes
        counted = np.bincount(cells.ravel(), minlength=self._counts.size)
        sums = np.nansum(age_s, axis=1)
        with self._lock:
            self._reads += 1
            self._rows += state.shape[1]
            self._counts += counted.reshape(self._counts.shape)
            self._age_sums += sums

    def failed(self) -> None:
        """Count a read that the store did not answer."""
        with self._lock:
            self._failures += 1

    def refused(self) -> None:
        """Count a read that policy refused."""
        with self._lock:
            self._refusals += 1

    def snapshot(self) -> OnlineReadStatistics:
        """Everything counted so far, of one moment."""
        with self._lock:
            counts, sums = self._counts.copy(), self._age_sums.copy()
            totals = (self._reads, self._rows, self._failures, self._refusals)
        stored = counts.sum(axis=1) - counts[:, Freshness.MISSING]
        views = tuple(
            ViewReadStatistics(
                view=name,
                num_rows_by_state=dict(
                    zip(LABELS, counts[position].sum(axis=1).tolist(), strict=True)
                ),
                num_rows_by_age_s=dict(
                    zip(self._bounds.tolist(), stored[position].cumsum()[:-1].tolist(), strict=True)
                ),
                age_sum_s=float(sums[position]),
            )
            for position, name in enumerate(self._views)
        )
        return OnlineReadStatistics(
            backend=self._backend,
            num_reads=totals[0],
            num_rows=totals[1],
            num_failures=totals[2],
            num_refusals=totals[3],
            views=views,
        )
