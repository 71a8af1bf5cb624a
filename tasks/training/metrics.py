"""Area under the ROC curve from histograms: bounded memory, and ranks can simply add theirs up."""

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
