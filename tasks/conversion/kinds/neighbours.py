"""What a conversion does to embeddings: are the nearest texts still the same ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.contracts.evaluation import Metric
from tasks.kernel.errors import DataContractError

OVERLAP_NAME = "neighbour overlap"
NEIGHBOURS = 5
FloatArray = NDArray[np.floating[Any]]


def overlap_change(
    source: FloatArray, variant: FloatArray, replicates: int = 1000, seed: int = 0
) -> Metric:
    """Share of the five nearest other texts that stay the same, minus 1, with its 95 % interval.

    Args:
        source: embeddings of the texts, shape (texts, width).
        variant: those of the converted program, same texts in the same order.
        replicates: draws of texts, with replacement, for the interval.
        seed: of the draws.

    Returns:
        0 where every text keeps its neighbours; the overlap is 1 more.

    Raises:
        DataContractError: there are too few texts to have neighbours.
    """
    overlaps = neighbour_overlaps(source, variant) - 1.0
    drawn = np.random.default_rng(seed).integers(0, len(overlaps), (replicates, len(overlaps)))
    low, high = np.quantile(overlaps[drawn].mean(axis=1), [0.025, 0.975])
    return Metric(value=float(overlaps.mean()), low=float(low), high=float(high))


def neighbour_overlaps(source: FloatArray, variant: FloatArray) -> NDArray[np.float64]:
    """For each text the share of its nearest others that both models agree on."""
    if len(source) <= NEIGHBOURS:
        raise DataContractError(
            f"{len(source)} texts have no {NEIGHBOURS} neighbours each; judge on more texts"
        )
    pairs = zip(_nearest(source), _nearest(variant), strict=True)
    return np.array([len(np.intersect1d(a, b)) / NEIGHBOURS for a, b in pairs])


def _nearest(embeddings: FloatArray) -> NDArray[np.int64]:
    vectors = embeddings.astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -np.inf)
    return np.argpartition(-likeness, NEIGHBOURS, axis=1)[:, :NEIGHBOURS]
