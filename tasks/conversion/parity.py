"""Does a converted model answer like the program it was made from, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.conversion.config import QualityBound
from tasks.conversion.rows import ModelInputs
from tasks.errors import ConversionParityError

EDGE_BATCH_SIZES = (1, 2, 7, 1024)
FloatArray = NDArray[np.floating[Any]]
Scorer = Callable[[NDArray[np.int32], NDArray[np.float32]], NDArray[np.float32]]


@dataclass(frozen=True)
class ScoreGap:
    """Distance between two models' probabilities for the same rows."""

    largest: float
    mean: float
    num_rows: int


def score_gap(reference: FloatArray, converted: FloatArray) -> ScoreGap:
    """Largest and mean gap between two models' probabilities for the same rows.

    Args:
        reference: probabilities of the PyTorch program, shape (rows,).
        converted: probabilities of the converted model, same rows in the same order.

    Returns:
        max and mean of |reference - converted|; zeros where there are no rows.

    Raises:
        ConversionParityError: the shapes differ or a value is not finite.
    """
    if reference.shape != converted.shape:
        raise ConversionParityError(
            f"converted model returned shape {converted.shape}, expected {reference.shape} "
            "(rows,); was the batch axis exported as dynamic?"
        )
    for whose, scores in (("PyTorch program", reference), ("converted model", converted)):
        odd = int(np.count_nonzero(~np.isfinite(scores)))
        if odd:
            raise ConversionParityError(
                f"the {whose} gives NaN or Inf for {odd} of {len(scores)} rows, so parity is "
                "undefined; expected a probability for every row, missing values included"
            )
    gaps = np.abs(reference.astype(np.float64) - converted.astype(np.float64))
    if not gaps.size:
        return ScoreGap(largest=0.0, mean=0.0, num_rows=0)
    return ScoreGap(largest=float(gaps.max()), mean=float(gaps.mean()), num_rows=len(gaps))


def score_rows(model: Scorer, inputs: ModelInputs) -> NDArray[np.float32]:
    """Probabilities of all rows, block by block (a program takes 65,536 rows a call at most).

    Raises:
        ConversionParityError: the model returns another number of scores than it got rows.
    """
    parts = []
    for block in inputs.blocks():
        scores = model(block.categorical, block.numeric)
        if scores.shape != (block.num_rows,):
            raise ConversionParityError(
                f"the model returned shape {scores.shape} for {block.num_rows} rows, expected "
                f"({block.num_rows},); was the batch axis exported as dynamic?"
            )
        parts.append(scores)
    return np.concatenate(parts)


def edge_gap(source: Scorer, converted: Scorer, edges: ModelInputs) -> ScoreGap:
    """Largest gap on the edge rows, in calls of 1, 2, 7 and 1024 rows.

    Args:
        source: the PyTorch program.
        converted: the model made from it.
        edges: at least 1024 rows that data rarely holds.

    Raises:
        ConversionParityError: a shape differs or a value is not finite.
    """
    gaps = []
    for rows in EDGE_BATCH_SIZES:
        for start in {0, min(1, edges.num_rows - rows), edges.num_rows - rows}:
            batch = edges.block(start, start + rows)
            gaps.append(
                score_gap(*(m(batch.categorical, batch.numeric) for m in (source, converted)))
            )
    return ScoreGap(
        largest=max(gap.largest for gap in gaps),
        mean=float(np.mean([gap.mean for gap in gaps])),
        num_rows=sum(gap.num_rows for gap in gaps),
    )


def parity_failure(rows: ScoreGap, edges: ScoreGap, bound: QualityBound) -> str | None:
    """Why the gaps are beyond the bound, as a sentence; None where they are within."""
    for where, gap in (("test", rows), ("edge", edges)):
        if gap.largest > bound.max_gap:
            return (
                f"a probability differs by {gap.largest:.2g} from PyTorch on {gap.num_rows} "
                f"{where} rows, allowed are {bound.max_gap:.2g}"
            )
    if rows.mean > bound.mean_gap:
        return (
            f"probabilities differ by {rows.mean:.2g} from PyTorch on average over {rows.num_rows} "
            f"test rows, allowed are {bound.mean_gap:.2g}"
        )
    return None
