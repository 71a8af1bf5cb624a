"""Quality from totals of bounded size, which ranks can simply add up: AUC from histograms, R2."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Two rows in one bin count as a tie: at worst the AUC is off by half the share of such pairs.
NUM_SCORE_BINS = 1 << 16


def score_histograms(
    scores: NDArray[np.float32], labels: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Rows by score, shape (2, NUM_SCORE_BINS): first those with label 0, then those with 1.

    Args:
        scores: probabilities, shape (rows,).
        labels: 0 or 1, shape (rows,).
    """
    bins = np.minimum((scores.astype(np.float64) * NUM_SCORE_BINS).astype(int), NUM_SCORE_BINS - 1)
    return np.stack(
        [
            np.bincount(bins[labels == label], minlength=NUM_SCORE_BINS).astype(np.float64)
            for label in (0, 1)
        ]
    )


def histogram_auc(histograms: NDArray[np.float64]) -> float:
    """Probability that a row with label 1 scores above one with label 0; a tie counts half.

    Args:
        histograms: from `score_histograms`, summed over ranks; both labels must occur.
    """
    negatives, positives = histograms
    below = np.cumsum(negatives) - negatives
    pairs = negatives.sum() * positives.sum()
    return float((positives * (below + negatives / 2)).sum() / pairs)


def squared_sums(
    predictions: NDArray[np.float64], labels: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Totals of `explained_share`: squared errors, labels, squared labels, rows; shape (4,).

    Args:
        predictions: shape (rows,).
        labels: shape (rows,); about standardised, or the squares lose precision.
    """
    errors = predictions - labels
    return np.array([errors @ errors, labels.sum(), labels @ labels, len(labels)], dtype=float)


def explained_share(totals: NDArray[np.float64]) -> float:
    """R2: 1 minus the squared errors over those of the labels' mean; the labels must differ.

    Args:
        totals: from `squared_sums`, summed over ranks.
    """
    errors, labels, squares, num_rows = totals
    return float(1 - errors / (squares - labels**2 / num_rows))
