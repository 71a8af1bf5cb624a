"""Does a converted model answer like the program it was made from, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.contracts.data import TaskKind
from tasks.conversion.config import QualityBound
from tasks.conversion.rows import ModelInputs
from tasks.errors import ConversionParityError

SCORES_TOLD: dict[TaskKind, tuple[str, str, str]] = {
    "classification": ("a probability", "probabilities", ""),
    "regression": ("a prediction", "predictions", " standard deviations"),
}
"""One score, many scores and their unit, for people."""
EDGE_BATCH_SIZES = (1, 2, 7, 1024)
FloatArray = NDArray[np.floating[Any]]
Scorer = Callable[[NDArray[np.int32], NDArray[np.float32]], NDArray[np.float32]]


@dataclass(frozen=True)
class ScoreGap:
    """Distance between two models' scores for the same rows: probabilities, or predictions.

    Predictions of a regression are measured in standard deviations of the label.
    """

    largest: float
    mean: float
    num_rows: int


def score_gap(reference: FloatArray, converted: FloatArray, unit: float = 1.0) -> ScoreGap:
    """Largest and mean gap between two models' scores for the same rows.

    Args:
        reference: scores of the PyTorch program, shape (rows,).
        converted: scores of the converted model, same rows in the same order.
        unit: what a gap of 1 is: 1 for probabilities, a standard deviation for predictions.

    Returns:
        max and mean of |reference - converted| / unit; zeros where there are no rows.

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
                "undefined; expected a score for every row, missing values included"
            )
    gaps = np.abs(reference.astype(np.float64) - converted.astype(np.float64)) / unit
    if not gaps.size:
        return ScoreGap(largest=0.0, mean=0.0, num_rows=0)
    return ScoreGap(largest=float(gaps.max()), mean=float(gaps.mean()), num_rows=len(gaps))


def score_rows(model: Scorer, inputs: ModelInputs) -> NDArray[np.float32]:
    """Scores of all rows, block by block (a program takes 65,536 rows a call at most).

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


def edge_gap(source: Scorer, converted: Scorer, edges: ModelInputs, unit: float = 1.0) -> ScoreGap:
    """Largest gap on the edge rows, in calls of 1, 2, 7 and 1024 rows.

    Args:
        source: the PyTorch program.
        converted: the model made from it.
        edges: at least 1024 rows that data rarely holds.
        unit: as `score_gap`.

    Raises:
        ConversionParityError: a shape differs or a value is not finite.
    """
    gaps = []
    for rows in EDGE_BATCH_SIZES:
        for start in {0, min(1, edges.num_rows - rows), edges.num_rows - rows}:
            batch = edges.block(start, start + rows)
            own, other = (m(batch.categorical, batch.numeric) for m in (source, converted))
            gaps.append(score_gap(own, other, unit))
    return ScoreGap(
        largest=max(gap.largest for gap in gaps),
        mean=float(np.mean([gap.mean for gap in gaps])),
        num_rows=sum(gap.num_rows for gap in gaps),
    )


def parity_failure(
    rows: ScoreGap, edges: ScoreGap, bound: QualityBound, task: TaskKind = "classification"
) -> str | None:
    """Why the gaps are beyond the bound, as a sentence; None where they are within."""
    one, many, unit = SCORES_TOLD[task]
    for where, gap in (("test", rows), ("edge", edges)):
        if gap.largest > bound.max_gap:
            return (
                f"{one} differs by {gap.largest:.2g}{unit} from PyTorch on {gap.num_rows} "
                f"{where} rows, allowed are {bound.max_gap:.2g}"
            )
    if rows.mean > bound.mean_gap:
        return (
            f"{many} differ by {rows.mean:.2g}{unit} from PyTorch on average over {rows.num_rows} "
            f"test rows, allowed are {bound.mean_gap:.2g}"
        )
    return None
